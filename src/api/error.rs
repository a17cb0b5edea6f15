//! Errors in the shape that OpenAI's clients read.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::told::Contradiction;
use crate::{GenerateError, NodeError};
use shoal_actors::catalog::{CatalogError, StoreError};
use shoal_actors::scheduler::GenerateRefusal;

/// A failed request, as its client hears of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    pub(super) param: Option<String>,
    pub(super) code: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A parameter that cannot be used.
    pub(super) fn parameter(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some("invalid_value"), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// A parameter that this version does not support.
    pub(super) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::parameter(param, message) }
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub(super) fn no_model(message: impl Into<String>) -> Self {
        Self { param: Some("model".to_owned()), code: Some("model_not_found"), ..Self::not_found(message) }
    }

    /// What a client was shown is not what the answer is.
    pub(super) fn contradiction(why: &Contradiction) -> Self {
        Self { code: Some("contradiction"), ..Self::new(StatusCode::CONFLICT, why.to_string()) }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::FORBIDDEN => "permission_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The body.
    pub(super) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind(), "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<NodeError> for ApiError {
    fn from(error: NodeError) -> Self {
        let message = error.to_string();
        let unavailable = |code| Self { code: Some(code), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message.clone()) };
        match error {
            NodeError::UnknownModel { .. } | NodeError::Catalog(CatalogError::Reference(_) | CatalogError::NotHere { .. }) => {
                Self::no_model(message)
            }
            // A path that leads to no file.
            NodeError::Catalog(CatalogError::Store(StoreError::Disk { doing: "open", .. })) => Self::no_model(message),
            NodeError::Catalog(CatalogError::Store(StoreError::NotAModel { .. })) => {
                Self { code: Some("invalid_model"), ..Self::parameter("model", message) }
            }
            NodeError::UnknownInstance(_) => Self { code: Some("instance_not_found"), ..Self::not_found(message) },
            NodeError::NotPlaced(_) => unavailable("not_placed"),
            NodeError::Unreachable(_) => unavailable("node_unreachable"),
            NodeError::Generate(error) => error.into(),
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}

impl From<GenerateError> for ApiError {
    fn from(error: GenerateError) -> Self {
        let message = error.to_string();
        let with = |status, code| Self { code: Some(code), ..Self::new(status, message.clone()) };
        match error {
            GenerateError::Refused(GenerateRefusal::Invalid(_)) => with(StatusCode::BAD_REQUEST, "invalid_value"),
            GenerateError::Refused(GenerateRefusal::Busy(_)) => with(StatusCode::TOO_MANY_REQUESTS, "busy"),
            GenerateError::Refused(GenerateRefusal::OtherRequest(_)) => with(StatusCode::CONFLICT, "request_exists"),
            GenerateError::Refused(_) => with(StatusCode::SERVICE_UNAVAILABLE, "instance_unavailable"),
            GenerateError::Unreachable(_) | GenerateError::NotFoundYet(_) => with(StatusCode::SERVICE_UNAVAILABLE, "node_unreachable"),
            _ => with(StatusCode::INTERNAL_SERVER_ERROR, "generation_broken"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_known_shape() {
        let error = ApiError::parameter("n", "`n` must be 1");
        assert_eq!(
            error.body(),
            json!({"error": {"message": "`n` must be 1", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}})
        );
        let unknown = NodeError::UnknownModel { model: "x".to_owned(), on_disk: vec!["y".to_owned()] };
        let error = ApiError::from(unknown);
        assert_eq!((error.status, error.code), (StatusCode::NOT_FOUND, Some("model_not_found")));
        assert!(error.message.contains("`x`") && error.message.contains('y'));
        let busy = GenerateError::Refused(GenerateRefusal::Busy("64 requests wait".to_owned()));
        let response = ApiError::from(busy).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(response.headers().contains_key(header::RETRY_AFTER));
    }
}
