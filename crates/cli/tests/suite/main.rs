//! The command's tests in one binary.
mod command_line;
mod control;
