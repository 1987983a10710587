//! Failures of the command: one line with the remedy, and an exit status.

use std::fmt;

/// Exit statuses, those of `docker run`: 125 this command failed, 126 the program can't be run, 127 it was not found.
pub const EXIT_FAILURE: u8 = 1;
pub const EXIT_RUN_FAILED: u8 = 125;
pub const EXIT_NOT_EXECUTABLE: u8 = 126;
pub const EXIT_NOT_FOUND: u8 = 127;

pub type Result<T> = std::result::Result<T, Failure>;

#[derive(Debug)]
pub struct Failure {
    message: String,
    code: u8,
    keeps_lines: bool,
}

impl Failure {
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: EXIT_FAILURE, keeps_lines: false }
    }

    /// Said in the message's own lines: a list of things to mend.
    pub fn in_lines(mut self) -> Self {
        self.keeps_lines = true;
        self
    }

    pub fn with_code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// The code unless a more specific one was set already.
    pub fn or_code(self, code: u8) -> Self {
        if self.code == EXIT_FAILURE { self.with_code(code) } else { self }
    }

    pub fn code(&self) -> u8 {
        self.code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.keeps_lines {
            return f.write_str(&self.message);
        }
        // One line, whatever a tool's own message looked like.
        let mut first = true;
        for line in self.message.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if !first {
                f.write_str("; ")?;
            }
            f.write_str(line)?;
            first = false;
        }
        Ok(())
    }
}

impl From<freeflow_hostnet::Error> for Failure {
    fn from(error: freeflow_hostnet::Error) -> Self {
        Self::new(error.to_string())
    }
}

impl From<Failure> for freeflow_hostnet::Error {
    fn from(failure: Failure) -> Self {
        Self::new(failure.to_string())
    }
}

/// Adds what was being done to an error.
pub trait Context<T> {
    fn context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure::new(format!("{what}: {error}")))
    }
}

/// Shorthand for `Err(Failure::new(format!(…)))`.
macro_rules! fail {
    ($($argument:tt)*) => {
        return Err($crate::failure::Failure::new(format!($($argument)*)))
    };
}
pub(crate) use fail;
