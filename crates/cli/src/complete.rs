//! `freeflow complete`: for a shell, the names that may stand at the end of a command line: vNICs, networks, hosts,
//! containers, objects. The command's own words and options are completed by the shell itself, without this.
//!
//! Where a name belongs follows from the definitions of the command line. Nobody waits for it: it ends after
//! [`TIME`], and says nothing of what went wrong.

use crate::admin::{Admin, Presence};
use crate::arguments::Arguments;
use crate::control::api::{Api, BASE};
use crate::control::kinds::{KINDS, Kind};
use crate::failure::Result;
use crate::output;
use crate::record::Records;
use crate::sys::exit_now;
use clap::{Arg, ArgAction, CommandFactory};
use freeflow_hostnet::run_dir::RunDir;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const TIME: Duration = Duration::from_millis(200);

/// The names that a place of the command line waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Containers,
    Hosts,
    Kinds,
    Objects(Kind),
}

/// The words up to the cursor, without the program; the last one is being typed.
pub fn complete(run_dir: &RunDir, words: &[OsString]) {
    let timer = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(TIME);
        exit_now(0);
    });
    let words: Option<Vec<&str>> = words.iter().map(|word| word.to_str()).collect();
    let Some(place) = words.filter(|_| timer.is_ok()).and_then(|words| Place::of(&words)) else { return };
    let run_dir = place.run_dir.as_ref().and_then(|path| RunDir::new(path).ok()).unwrap_or_else(|| run_dir.clone());
    let mut names = names(&run_dir, place.wanted).unwrap_or_default();
    // The shell takes others apart, or for its own.
    names.retain(|name| is_plain(name) && name.starts_with(&place.begun));
    names.sort();
    names.dedup();
    if !names.is_empty() {
        output::line(names.join("\n"));
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

fn names(run_dir: &RunDir, wanted: Wanted) -> Result<Vec<String>> {
    match wanted {
        Wanted::Kinds => Ok(KINDS.iter().map(|kind| kind.plural.to_owned()).collect()),
        Wanted::Containers => Ok(Records::of(run_dir).list().into_iter().map(|record| record.name).collect()),
        Wanted::Objects(kind) => objects(run_dir, kind.plural),
        Wanted::Hosts => {
            let mut hosts = objects(run_dir, "hosts")?;
            if let Presence::Running(mut admin) = Admin::look(run_dir) {
                hosts.extend(admin.peers()?.peers.into_iter().map(|peer| peer.host));
            }
            Ok(hosts)
        }
    }
}

fn objects(run_dir: &RunDir, plural: &str) -> Result<Vec<String>> {
    let list = Api::of(run_dir)?.with_limit(TIME, "").get(&format!("{BASE}/{plural}"))?;
    let items = list["items"].as_array().into_iter().flatten();
    Ok(items.filter_map(|item| Some(item["metadata"]["name"].as_str()?.to_owned())).collect())
}

/// The end of a command line.
struct Place {
    wanted: Wanted,
    begun: String,
    run_dir: Option<PathBuf>,
}

impl Place {
    /// `None`: no name belongs there.
    fn of(words: &[&str]) -> Option<Self> {
        let (&last, before) = words.split_last()?;
        let mut root = Arguments::command();
        root.build();
        let (mut command, mut path, mut others, mut run_dir) = (&root, Vec::new(), Vec::new(), None);
        let mut waiting: Option<&Arg> = None;
        // Shells make `=` a word of its own.
        for &word in before.iter().filter(|word| **word != "=") {
            if let Some(option) = waiting.take() {
                if option.get_id() == "run_dir" {
                    run_dir = Some(PathBuf::from(word));
                }
            } else if word == "--" {
                return None;
            } else if word.starts_with('-') && word.len() > 1 {
                waiting = option_of(command, word).filter(|option| option.get_action().takes_values());
            } else if let Some(inner) = command.find_subcommand(word).filter(|_| others.is_empty()) {
                command = inner;
                path.push(inner.get_name());
            } else {
                others.push(word);
            }
        }
        let begun = if last == "=" { "" } else { last };
        let argument = match waiting {
            Some(option) => option,
            None if begun.starts_with('-') => return None,
            None => positional(command, others.len())?,
        };
        let name = argument.get_value_names()?.first()?.as_str();
        Some(Self { wanted: wanted(&path, name, &others)?, begun: begun.to_owned(), run_dir })
    }
}

/// An option whose value is not in the same word.
fn option_of<'a>(command: &'a clap::Command, word: &str) -> Option<&'a Arg> {
    let mut options = command.get_arguments();
    match word.strip_prefix("--") {
        Some(name) => options.find(|option| option.get_long() == Some(name)),
        None => {
            let letter = word.strip_prefix('-')?.chars().next_back();
            options.find(|option| option.get_short().is_some() && option.get_short() == letter)
        }
    }
}

/// The argument for the word with this number. Of several the last one takes all further words.
fn positional(command: &clap::Command, number: usize) -> Option<&Arg> {
    let all: Vec<&Arg> = command.get_positionals().collect();
    let is_open = |last: &&&Arg| matches!(last.get_action(), ArgAction::Append) && !last.is_trailing_var_arg_set();
    let found = all.get(number).or_else(|| all.last().filter(is_open))?;
    (!found.is_trailing_var_arg_set()).then_some(found)
}

fn wanted(path: &[&str], value: &str, others: &[&str]) -> Option<Wanted> {
    let objects = |plural: &str| Kind::named(plural).ok().map(Wanted::Objects);
    match (path, value) {
        (_, "NET" | "NETWORK") => objects("networks"),
        (_, "VNIC") | (["ping"], "FROM" | "TO") => objects("vnics"),
        (_, "HOST") => Some(Wanted::Hosts),
        (["exec" | "stop" | "rm" | "logs"], "NAME") => Some(Wanted::Containers),
        (["get" | "describe" | "delete"], "KIND") => Some(Wanted::Kinds),
        (["get" | "describe" | "delete"], "NAME") => objects(others.first()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(line: &str) -> Option<(Wanted, String)> {
        let words: Vec<&str> = line.split(' ').collect();
        Place::of(&words).map(|place| (place.wanted, place.begun))
    }

    #[test]
    fn a_place_wants_names_by_the_definitions_of_the_command_line() {
        let objects = |plural| Wanted::Objects(Kind::named(plural).unwrap());
        for (line, wanted, begun) in [
            ("run --network re", objects("networks"), "re"),
            ("run --network = re", objects("networks"), "re"),
            ("run --network =", objects("networks"), ""),
            ("run --name x --vnic ", objects("vnics"), ""),
            ("network set d", objects("networks"), "d"),
            ("exec ", Wanted::Containers, ""),
            ("exec -e A=b w", Wanted::Containers, "w"),
            ("rm -f one two th", Wanted::Containers, "th"),
            ("get ", Wanted::Kinds, ""),
            ("describe vnic d", objects("vnics"), "d"),
            ("delete nets one two", objects("networks"), "two"),
            ("move db --to h", Wanted::Hosts, "h"),
            ("move d", objects("vnics"), "d"),
            ("host drain ", Wanted::Hosts, ""),
            ("ping -o json a b", objects("vnics"), "b"),
        ] {
            assert_eq!(place(line), Some((wanted, begun.to_owned())), "{line}");
        }
        for line in
            ["", "ne", "run --name x", "run -", "exec c sh", "exec c -- ", "up --host h", "get nonsense x", "logs a b"]
        {
            assert_eq!(place(line), None, "{line}");
        }
        let words = ["--run-dir", "/run/other", "logs", ""];
        assert_eq!(Place::of(&words).unwrap().run_dir, Some(PathBuf::from("/run/other")));
    }

    #[test]
    fn names_that_a_shell_would_read_otherwise_are_none() {
        assert!(is_plain("web-1.a_B") && !is_plain("$(id)") && !is_plain("a b") && !is_plain("") && !is_plain("a:b"));
    }
}
