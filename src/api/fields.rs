//! The fields of a request, taken one by one, so that none goes unnoticed.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::error::ApiError;

/// What is left of a request's body. A field that is `null` counts as absent.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads a body.
    pub(super) fn read(body: Result<Bytes, BytesRejection>) -> Result<Self, ApiError> {
        let body = body.map_err(|rejection| {
            let status = rejection.status();
            let message = match status {
                StatusCode::PAYLOAD_TOO_LARGE => format!("the body is longer than {} bytes", super::BODY_BYTES_MAX),
                _ => format!("the body cannot be read: {}", rejection.body_text()),
            };
            ApiError::new(status, message)
        })?;
        let value: Value = serde_json::from_slice(&body)
            .map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("the body is not valid JSON: {error}")))?;
        Self::from_value(value)
    }

    pub(super) fn from_value(value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self(map)),
            other => Err(ApiError::new(StatusCode::BAD_REQUEST, format!("the body must be a JSON object, not {}", kind(&other)))),
        }
    }

    /// Takes a field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(name, "a string", &other)),
        }
    }

    pub(super) fn required_string(&mut self, name: &str) -> Result<String, ApiError> {
        match self.string(name)? {
            Some(text) if !text.trim().is_empty() => Ok(text),
            Some(_) => Err(ApiError::parameter(name, format!("`{name}` is empty"))),
            None => Err(missing(name)),
        }
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(name, "true or false", &other)),
        }
    }

    /// A number within bounds.
    pub(super) fn number(&mut self, name: &str, low: f64, high: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong(name, "a number", &value))?;
        if !(low..=high).contains(&number) {
            return Err(ApiError::parameter(name, format!("`{name}` is {number}; it must be from {low} to {high}")));
        }
        Ok(Some(number as f32))
    }

    /// A whole number within bounds.
    pub(super) fn integer(&mut self, name: &str, low: u32, high: u32) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // Anything from -2⁶³ to 2⁶⁴.
        let whole = value.as_u64().map(i128::from).or_else(|| value.as_i64().map(i128::from));
        let number = whole.ok_or_else(|| wrong(name, "a whole number", &value))?;
        match u32::try_from(number).ok().filter(|number| (low..=high).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(ApiError::parameter(name, format!("`{name}` is {number}; it must be from {low} to {high}"))),
        }
    }

    /// Everything must have been taken by now.
    pub(super) fn finish(self, what: &str) -> Result<(), ApiError> {
        match self.0.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("`{name}` is not a parameter of {what}");
                Err(ApiError { code: Some("unknown_parameter"), ..ApiError::parameter(name, message) })
            }
        }
    }
}

pub(super) fn missing(name: &str) -> ApiError {
    ApiError { code: Some("missing_required_parameter"), ..ApiError::parameter(name, format!("`{name}` is missing")) }
}

pub(super) fn wrong(name: &str, wanted: &str, found: &Value) -> ApiError {
    ApiError { code: Some("invalid_type"), ..ApiError::parameter(name, format!("`{name}` must be {wanted}, not {}", kind(found))) }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_number_that_is_out_of_bounds_hears_both_bounds() {
        let read = |value: Value| Fields::from_value(json!({"n": value})).unwrap().integer("n", 1, u32::MAX);
        assert_eq!(read(json!(4_294_967_295_u64)), Ok(Some(u32::MAX)));
        for (value, said) in
            [(json!(4_294_967_296_u64), "4294967296"), (json!(u64::MAX), "18446744073709551615"), (json!(-1), "-1"), (json!(0), "0")]
        {
            let error = read(value).unwrap_err();
            assert_eq!(error.message, format!("`n` is {said}; it must be from 1 to 4294967295"));
        }
        assert_eq!(read(json!(1.5)).unwrap_err().code, Some("invalid_type"));
    }
}
