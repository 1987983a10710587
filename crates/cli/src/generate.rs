//! `freeflow generate DIR`: man pages and shell completions, out of the definitions of the command line.

use crate::arguments::Arguments;
use crate::failure::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use std::fs;
use std::path::Path;

/// Writes `man/*.1` and `completions/*`.
pub fn generate(directory: &Path) -> Result<()> {
    let (pages, completions) = (directory.join("man"), directory.join("completions"));
    for directory in [&pages, &completions] {
        fs::create_dir_all(directory).context(directory.display())?;
    }
    let mut command = Arguments::command();
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, &name, &completions).context(completions.display())?;
    }
    clap_mangen::generate_to(command, &pages).context(pages.display())
}
