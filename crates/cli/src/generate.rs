//! `freeflow generate DIR`: man pages and shell completions, out of the definitions of the command line. In bash names
//! of what is there are completed besides, by `freeflow complete`.

use crate::arguments::Arguments;
use crate::failure::{Context, Result, fail};
use clap::CommandFactory;
use clap_complete::Shell;
use std::fs;
use std::path::Path;

/// Bash's function before the one that is generated, under which the command is registered.
const NAMES_IN_BASH: &str = r#"
_freeflow_names() {
    _freeflow "$@"
    local names
    names=$("$1" complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null </dev/null) || return 0
    [[ -z "${names}" ]] || COMPREPLY=( ${names} )
}
"#;
const REGISTERED: &str = "complete -F _freeflow ";
const REGISTERED_WITH_NAMES: &str = "complete -F _freeflow_names ";

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
    add_names(&completions.join(format!("{name}.bash")))?;
    clap_mangen::generate_to(command, &pages).context(pages.display())
}

fn add_names(script: &Path) -> Result<()> {
    let text = fs::read_to_string(script).context(script.display())?;
    let Some(at) = text.rfind("\nif [[ \"${BASH_VERSINFO").filter(|_| text.contains(REGISTERED)) else {
        fail!("{} does not register the command as it did", script.display());
    };
    let registered = text[at..].replace(REGISTERED, REGISTERED_WITH_NAMES);
    fs::write(script, [&text[..at], NAMES_IN_BASH, &registered].concat()).context(script.display())
}
