//! The command line of an OCI runtime (runc's, and crun's where it has the same), as far as `freeflow runtime` has to
//! understand it. Pure; words that are not understood are refused where a container would start without its vNIC.

use crate::failure::{Result, fail};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// Options before the command that take a value.
const GLOBAL_VALUES: [&str; 7] = ["root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"];
const GLOBAL_FLAGS: [&str; 2] = ["debug", "systemd-cgroup"];
/// Options of `create` and `run`.
const START_VALUES: [&str; 6] = ["bundle", "b", "console-socket", "pidfd-socket", "pid-file", "preserve-fds"];
const START_FLAGS: [&str; 6] = ["no-pivot", "no-new-keyring", "detach", "d", "keep", "no-subreaper"];

/// Flags with which nothing is started, whatever the command: before it, and of it.
const GLOBAL_QUESTIONS: [&str; 4] = ["version", "v", "help", "h"];
const START_QUESTIONS: [&str; 2] = ["help", "h"];
/// The word after which none is an option.
const END_OF_OPTIONS: &str = "--";

/// The real runtime's part in a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing here concerns a container's configuration.
    Pass,
    /// `create` or `run` of a bundle.
    Start {
        bundle: PathBuf,
    },
    Checkpoint {
        id: OsString,
    },
    Restore,
}

/// A call of a runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub action: Action,
    /// Value of `--root`.
    pub root: Option<OsString>,
    pub log: Option<Log>,
}

/// Where the engine reads a runtime's errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    pub path: PathBuf,
    pub is_json: bool,
}

/// An option's name without its dashes, and the value after `=`. `None`: not an option.
fn option(word: &OsStr) -> Option<(&[u8], Option<OsString>)> {
    let bytes = word.as_bytes();
    let name = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-")).filter(|name| !name.is_empty())?;
    match name.iter().position(|&byte| byte == b'=') {
        Some(at) => Some((&name[..at], Some(OsString::from_vec(name[at + 1..].to_vec())))),
        None => Some((name, None)),
    }
}

fn is_one_of(name: &[u8], known: &[&str]) -> bool {
    known.iter().any(|known| known.as_bytes() == name)
}

/// Options with their values, and the words that are none.
#[derive(Debug, Default)]
struct Options<'a> {
    values: Vec<(&'a [u8], OsString)>,
    others: Vec<&'a OsStr>,
    is_question: bool,
}

/// Options that are known in a place.
struct Known<'a> {
    values: &'a [&'a str],
    flags: &'a [&'a str],
    questions: &'a [&'a str],
}

const GLOBAL: Known = Known { values: &GLOBAL_VALUES, flags: &GLOBAL_FLAGS, questions: &GLOBAL_QUESTIONS };
const START: Known = Known { values: &START_VALUES, flags: &START_FLAGS, questions: &START_QUESTIONS };

impl<'a> Options<'a> {
    /// `to_first`: reads up to the first word that is no option, and counts the words.
    fn read(words: &'a [OsString], known: &Known<'_>, to_first: bool) -> Result<(Self, usize)> {
        let mut all = Self::default();
        let mut at = 0;
        while let Some(word) = words.get(at) {
            if word == END_OF_OPTIONS {
                at += 1;
                if !to_first {
                    all.others.extend(words[at..].iter().map(OsString::as_os_str));
                }
                break;
            }
            let Some((name, value)) = option(word) else {
                if to_first {
                    break;
                }
                all.others.push(word);
                at += 1;
                continue;
            };
            let takes_value = is_one_of(name, known.values);
            let is_question = is_one_of(name, known.questions) && value.is_none();
            if !takes_value && !is_question && !is_one_of(name, known.flags) {
                fail!("the option {} is unknown, so the container's bundle can't be found", word.display());
            }
            all.is_question |= is_question;
            at += 1;
            if takes_value {
                let value = match value {
                    Some(value) => value,
                    None => {
                        let Some(next) = words.get(at) else { fail!("a value is missing after {}", word.display()) };
                        at += 1;
                        next.clone()
                    }
                };
                all.values.push((name, value));
            }
        }
        Ok((all, at))
    }

    /// The last value of an option, as runtimes take it.
    fn value(&self, names: &[&str]) -> Option<&OsString> {
        self.values.iter().rev().find(|(name, _)| is_one_of(name, names)).map(|(_, value)| value)
    }
}

fn may_start(word: &OsString) -> bool {
    ["create", "run", "checkpoint", "restore"].iter().any(|command| word == command)
}

/// Reads the words of a call.
///
/// # Errors
/// A container might start, and its bundle can't be found for certain.
pub fn read(words: &[OsString]) -> Result<Call> {
    let (global, at) = match Options::read(words, &GLOBAL, true) {
        Ok(read) => read,
        // Another runtime's options, for a call that starts nothing.
        Err(_) if !words.iter().any(may_start) => return Ok(Call { action: Action::Pass, root: None, log: None }),
        Err(failure) => return Err(failure),
    };
    let log = global.value(&["log"]).map(|path| Log {
        path: PathBuf::from(path),
        is_json: global.value(&["log-format"]).is_some_and(|format| format == "json"),
    });
    let rest = words.get(at + 1..).unwrap_or_default();
    let action = match words.get(at).and_then(|command| command.to_str()) {
        _ if global.is_question => Action::Pass,
        Some("create" | "run") => start(rest)?,
        Some("checkpoint") => match rest.last() {
            Some(id) if option(id).is_none() && id != END_OF_OPTIONS => Action::Checkpoint { id: id.clone() },
            _ => fail!("the container's id has to be the last word of checkpoint"),
        },
        Some("restore") => Action::Restore,
        _ => Action::Pass,
    };
    Ok(Call { action, root: global.value(&["root"]).cloned(), log })
}

fn start(words: &[OsString]) -> Result<Action> {
    let (options, _) = Options::read(words, &START, false)?;
    if options.is_question {
        return Ok(Action::Pass);
    }
    if options.others.len() != 1 {
        fail!("one container id is expected, not {}", options.others.len());
    }
    Ok(Action::Start { bundle: options.value(&["bundle", "b"]).map_or_else(|| PathBuf::from("."), PathBuf::from) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn call(text: &str) -> Result<Call> {
        read(&text.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    fn bundle(text: &str) -> PathBuf {
        match call(text).unwrap().action {
            Action::Start { bundle } => bundle,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn the_bundle_is_found_as_engines_write_it() {
        let containerd = "--root /run/r --log /run/log.json --log-format json create --bundle /run/b --pid-file /p id";
        let read = call(containerd).unwrap();
        assert_eq!(read.action, Action::Start { bundle: "/run/b".into() });
        assert_eq!(read.root, Some("/run/r".into()));
        assert_eq!(read.log, Some(Log { path: "/run/log.json".into(), is_json: true }));
        assert_eq!(bundle("--root=/run/r run -b /x -d id"), Path::new("/x"));
        assert_eq!(bundle("-root /run/r -systemd-cgroup create -bundle=/x id"), Path::new("/x"));
        assert_eq!(bundle("create id --no-pivot --bundle /x"), Path::new("/x"));
        assert_eq!(bundle("run id"), Path::new("."));
        // A value that looks like a command or an option is a value.
        assert_eq!(bundle("--root create --log delete create --pid-file --bundle -b /x id"), Path::new("/x"));
        assert_eq!(bundle("create --bundle /a --bundle /b id"), Path::new("/b"));
        // After the end of options a word is none.
        assert_eq!(bundle("--root /r -- create --bundle /x -- id"), Path::new("/x"));
        assert_eq!(bundle("create --bundle /x -- --help"), Path::new("/x"));
        assert_eq!(bundle("create --bundle --help id"), Path::new("--help"));
    }

    #[test]
    fn all_else_is_passed_on() {
        for text in [
            "",
            "--version",
            "-v",
            "--root /r state id",
            "delete --force id",
            "exec --process /p id",
            "features",
            "create --help",
            "create --bundle /b id -h",
            "--help create --bundle /b id",
            "-v create id",
            "-- state id",
            "--",
            "--strange value list",
            "kill --all id 9",
        ] {
            assert_eq!(call(text).unwrap().action, Action::Pass, "{text}");
        }
    }

    #[test]
    fn a_start_that_is_not_understood_is_refused() {
        for text in [
            "--strange value create id",
            "create --config /c id",
            "create",
            "create a b",
            "create --bundle",
            "run -f other.json id",
            "create --help=false id",
            "--version=false create id",
            "create id -- id",
            "create --",
            "checkpoint",
            "checkpoint id --",
            "checkpoint --leave-running",
        ] {
            assert!(call(text).is_err(), "{text}");
        }
    }

    #[test]
    fn checkpoint_names_its_container_last() {
        let action = call("--root /r checkpoint --image-path /i --leave-running id").unwrap().action;
        assert_eq!(action, Action::Checkpoint { id: "id".into() });
        assert_eq!(call("restore --bundle /b id").unwrap().action, Action::Restore);
    }
}
