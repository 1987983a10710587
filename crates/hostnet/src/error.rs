//! Failures on the host, in words for people: no code here acts on the cause.

use std::fmt;

pub type Result<T> = std::result::Result<T, Error>;

/// One line: what was being done, and why it failed.
#[derive(Debug)]
pub struct Error {
    message: String,
}

impl Error {
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Adds what was being done to an error.
pub trait Context<T> {
    /// # Errors
    /// The same error, with `what` before it.
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error::new(format!("{what}: {error}")))
    }
}

/// Shorthand for `return Err(Error::new(format!(…)))`.
macro_rules! fail {
    ($($argument:tt)*) => {
        return Err($crate::error::Error::new(format!($($argument)*)))
    };
}
pub(crate) use fail;
