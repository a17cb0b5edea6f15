//! Typed access to an architecture's hyperparameters.

use super::ConfigError;
use crate::gguf::{Gguf, Value};

/// A file's hyperparameters, under the architecture's prefix.
pub(super) struct Hyper<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

/// Larger than any width or count of a model; products of two still fit 64 bits.
const COUNT_LIMIT: u64 = 1 << 31;

impl<'a> Hyper<'a> {
    pub(super) fn new(gguf: &'a Gguf) -> Result<Hyper<'a>, ConfigError> {
        let architecture = match gguf.metadata("general.architecture") {
            Some(Value::String(name)) => name,
            Some(other) => {
                return Err(ConfigError::Invalid {
                    file: gguf.name().to_owned(),
                    key: "general.architecture".to_owned(),
                    must: "a string",
                    is: other.kind().to_owned(),
                });
            }
            None => return Err(ConfigError::Missing { file: gguf.name().to_owned(), key: "general.architecture".to_owned() }),
        };
        Ok(Hyper { gguf, architecture })
    }

    /// The file.
    pub(super) fn gguf(&self) -> &'a Gguf {
        self.gguf
    }

    /// The architecture's name.
    pub(super) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// The whole key of a hyperparameter.
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.gguf.metadata(&self.key(key))
    }

    /// The error of a hyperparameter that cannot be.
    pub(super) fn invalid(&self, key: &str, must: &'static str, is: impl ToString) -> ConfigError {
        ConfigError::Invalid { file: self.gguf.name().to_owned(), key: self.key(key), must, is: is.to_string() }
    }

    /// The error of something that the decoder lacks.
    pub(super) fn unsupported(&self, what: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported { file: self.gguf.name().to_owned(), what: what.into() }
    }

    fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { file: self.gguf.name().to_owned(), key: self.key(key) }
    }

    /// A count or width of at least one, if it is given.
    pub(super) fn count_if_any(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        const MUST: &str = "a whole number from 1 to 2147483648";
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value {
            // Some converters write an entry for each layer. Layers of different shapes are another matter.
            Value::Array(array) => match array.as_u64s().as_deref() {
                Some([first, rest @ ..]) if rest.iter().all(|other| other == first) => Some(*first),
                Some([_, ..]) => return Err(self.unsupported(format!("layers that differ in {}", self.key(key)))),
                _ => None,
            },
            other => other.as_u64(),
        };
        match number {
            Some(number) if (1..=COUNT_LIMIT).contains(&number) => Ok(Some(number as usize)),
            Some(number) => Err(self.invalid(key, MUST, number)),
            None => Err(self.invalid(key, MUST, value.kind())),
        }
    }

    /// A count or width of at least one.
    pub(super) fn count(&self, key: &str) -> Result<usize, ConfigError> {
        self.count_if_any(key)?.ok_or_else(|| self.missing(key))
    }

    /// A positive, finite number, if it is given.
    pub(super) fn positive_if_any(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        const MUST: &str = "a positive number";
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f32() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
            Some(number) => Err(self.invalid(key, MUST, number)),
            None => Err(self.invalid(key, MUST, value.kind())),
        }
    }

    /// A positive, finite number.
    pub(super) fn positive(&self, key: &str) -> Result<f32, ConfigError> {
        self.positive_if_any(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number of at least zero, if it is given and not zero, which says that there is none.
    pub(super) fn positive_or_zero(&self, key: &str) -> Result<Option<f32>, ConfigError> {
        if self.get(key).and_then(Value::as_f32) == Some(0.0) { Ok(None) } else { self.positive_if_any(key) }
    }

    /// A count, if it is given and not zero, which says that there is none.
    pub(super) fn count_or_zero(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        if self.get(key).and_then(Value::as_u64) == Some(0) { Ok(None) } else { self.count_if_any(key) }
    }

    /// A string, if it is given.
    pub(super) fn str_if_any(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.invalid(key, "a string", other.kind())),
        }
    }

    /// A truth value, if it is given.
    pub(super) fn bool_if_any(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_bool().map(Some).ok_or_else(|| self.invalid(key, "true or false", value.kind())),
        }
    }

    /// A truth value for each layer, if they are given.
    pub(super) fn bools_if_any(&self, key: &str) -> Option<&'a [bool]> {
        self.get(key)?.as_array()?.as_bools()
    }
}
