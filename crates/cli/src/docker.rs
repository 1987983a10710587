//! `freeflow docker register` and `unregister`: the runtime `freeflow` of Docker's `daemon.json`, by which Docker
//! before 25 starts containers with a vNIC.
//!
//! The file is the operator's. Its text is changed in one place and is otherwise what it was: keys that are unknown
//! here, their order, blanks. A file that is no JSON object is refused and stays.
//!
//! Invariant: a text that was changed means what the former one meant, but for this runtime. It is put in place whole.

use crate::arguments::Docker;
use crate::failure::{Context, Result, fail};
use crate::{output, runtime, tools};
use rustix::fs::fchown;
use rustix::process::{Gid, Uid};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const RUNTIMES: &str = "runtimes";
const RUNTIME: &str = "freeflow";
const DEFAULT_RUNTIME: &str = "default-runtime";
const FILE_MODE: u32 = 0o644;
/// More than anybody writes.
const FILE_BYTES_MAX: u64 = 4 << 20;
const APPLY: &str = "Docker reads it after: systemctl reload docker";

pub fn docker(action: &Docker) -> Result<()> {
    match action {
        Docker::Register(settings) => register(&settings.file, settings.mark.as_deref()),
        Docker::Unregister(settings) => unregister(&settings.file, settings.mark.as_deref()),
    }
}

fn register(path: &Path, mark: Option<&Path>) -> Result<()> {
    // An operator may have taken it out of the file since.
    if mark.is_some_and(Path::exists) {
        return Ok(());
    }
    let program = program()?;
    let before = read(path)?;
    match with_runtime(&before, &program).context(path.display())? {
        Some(after) => {
            write(path, &before, &after)?;
            output::line(format!("{} has the runtime {RUNTIME}. {APPLY}", path.display()));
        }
        None => output::line(format!("{} has the runtime {RUNTIME} already.", path.display())),
    }
    mark.map_or(Ok(()), |mark| fs::write(mark, &program).context(mark.display()))
}

fn unregister(path: &Path, mark: Option<&Path>) -> Result<()> {
    let program = program()?;
    // Another installation may have noted it.
    if mark.is_some_and(|mark| fs::read_to_string(mark).ok().as_ref() != Some(&program)) {
        return Ok(());
    }
    let before = read(path)?;
    match without_runtime(&before, &program).context(path.display())? {
        None => output::line(format!("{} has no runtime {RUNTIME} of this installation.", path.display())),
        Some(after) => {
            // A file that was made for the runtime alone goes whole.
            match with_runtime("", &program)?.as_ref() == Some(&before) {
                true => fs::remove_file(path).context(path.display())?,
                false => write(path, &before, &after)?,
            }
            output::line(format!("{} has no runtime {RUNTIME} any more. {APPLY}", path.display()));
        }
    }
    mark.map_or(Ok(()), |mark| fs::remove_file(mark).context(mark.display()))
}

/// The runtime's program beside this one.
fn program() -> Result<String> {
    let path = tools::own_path()?.with_file_name(runtime::PROGRAM);
    match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => fail!("{}: Docker reads paths in UTF-8 alone", path.display()),
    }
}

/// A file that is not there has no text.
fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(text),
        file => file.and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text)).context(path.display())?,
    };
    Ok(text)
}

/// With the mode and owner of the file that it replaces; a link to it stays one.
fn write(path: &Path, former: &str, text: &str) -> Result<()> {
    let path = match fs::canonicalize(path) {
        Err(_) if path.is_symlink() => fail!("{}: a link to no file; it stays as it is", path.display()),
        Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
        path => path.context("Docker's settings")?,
    };
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory).context(directory.display())?;
    let before = fs::metadata(&path).ok();
    let mut name = PathBuf::from(path.file_name().unwrap_or_default()).into_os_string();
    name.push(format!(".{}.freeflow", std::process::id()));
    let temporary = directory.join(name);
    let result = (|| {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        if let Some(before) = &before {
            let (user, group) = (Uid::from_raw(before.uid()), Gid::from_raw(before.gid()));
            fchown(&file, Some(user), Some(group))?;
        }
        let mode = before.as_ref().map_or(FILE_MODE, |before| before.mode() & 0o777);
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        if before.is_some() && fs::read_to_string(&path)? != former {
            return Err(io::Error::other("somebody else has changed it meanwhile; it stays as it is"));
        }
        fs::rename(&temporary, &path)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    result.context(path.display())
}

fn object(text: &str) -> Result<Map<String, Value>> {
    // As Docker reads an empty file.
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_str(text).context("it is no JSON, and stays as it is")? {
        Value::Object(object) => Ok(object),
        _ => fail!("it is no JSON object, and stays as it is"),
    }
}

/// The runtime's settings in the file, if any.
fn registered(settings: &Map<String, Value>) -> Result<Option<&Value>> {
    match settings.get(RUNTIMES) {
        None => Ok(None),
        Some(Value::Object(runtimes)) => Ok(runtimes.get(RUNTIME)),
        Some(_) => fail!("its {RUNTIMES:?} is no object; it stays as it is"),
    }
}

fn path_of(runtime: &Value) -> Option<&Path> {
    runtime["path"].as_str().map(Path::new)
}

/// The text with the runtime. `None`: it has it.
fn with_runtime(text: &str, program: &str) -> Result<Option<String>> {
    let mut settings = object(text)?;
    let former = registered(&settings)?;
    if former.and_then(path_of) == Some(Path::new(program)) {
        return Ok(None);
    }
    let is_ours = |path: &Path| path.file_name().is_some_and(|name| name == runtime::PROGRAM);
    if former.is_some_and(|former| !path_of(former).is_some_and(is_ours)) {
        fail!("its runtime {RUNTIME:?} is another program; it stays as it is");
    }
    let entry = json!({"path": program});
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let whole = members(text, open(text));
    let runtimes = whole.iter().rfind(|member| member.name == RUNTIMES);
    let changed = match runtimes {
        Some(runtimes) => {
            let open = runtimes.value.start;
            let inner = members(text, open);
            match inner.iter().rfind(|member| member.name == RUNTIME) {
                Some(former) => replaced(text, former.value.clone(), &entry.to_string()),
                None => inserted(text, open, &format!("\n    {:?}: {entry}", RUNTIME), inner.is_empty(), "\n  "),
            }
        }
        None => {
            let member = format!("\n  {RUNTIMES:?}: {{\n    {RUNTIME:?}: {entry}\n  }}");
            inserted(text, open(text), &member, whole.is_empty(), "\n")
        }
    };
    let Value::Object(runtimes) = settings.entry(RUNTIMES).or_insert_with(|| json!({})) else { unreachable!() };
    runtimes.insert(RUNTIME.into(), entry);
    checked(changed, &settings).map(Some)
}

/// The text without the runtime of this program. `None`: it has none.
fn without_runtime(text: &str, program: &str) -> Result<Option<String>> {
    let mut settings = object(text)?;
    if registered(&settings)?.and_then(path_of) != Some(Path::new(program)) {
        return Ok(None);
    }
    if settings.get(DEFAULT_RUNTIME).is_some_and(|name| name == RUNTIME) {
        fail!("{DEFAULT_RUNTIME:?} is {RUNTIME:?}, without which Docker would not start; choose another one first");
    }
    let Value::Object(runtimes) = settings.entry(RUNTIMES).or_insert_with(|| json!({})) else { unreachable!() };
    runtimes.remove(RUNTIME);
    let goes_whole = runtimes.is_empty();
    if goes_whole {
        settings.remove(RUNTIMES);
    }
    let whole = members(text, open(text));
    let changed = whole.iter().rposition(|member| member.name == RUNTIMES).and_then(|at| {
        if goes_whole {
            return Some(removed(text, open(text), &whole, at));
        }
        let start = whole[at].value.start;
        let inner = members(text, start);
        let at = inner.iter().rposition(|member| member.name == RUNTIME)?;
        Some(removed(text, start, &inner, at))
    });
    checked(changed.unwrap_or_default(), &settings).map(Some)
}

/// A text that means this.
fn checked(text: String, expected: &Map<String, Value>) -> Result<String> {
    // A key that stands twice, for example.
    if object(&text).ok().as_ref() != Some(expected) {
        fail!("it can't be changed in one place; it stays as it is");
    }
    Ok(text)
}

// ---- places in a text that is JSON

/// A key with its value.
struct Member {
    name: String,
    whole: Range<usize>,
    value: Range<usize>,
}

fn open(text: &str) -> usize {
    text.find('{').unwrap_or(0)
}

fn skip_blanks(bytes: &[u8], at: usize) -> usize {
    at + bytes[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count()
}

/// Members of the object that opens there.
fn members(text: &str, open: usize) -> Vec<Member> {
    let bytes = text.as_bytes();
    let mut all = Vec::new();
    let mut at = skip_blanks(bytes, open + 1);
    while bytes.get(at) == Some(&b'"') {
        let begin = at;
        let end = value_end(bytes, begin);
        let name = serde_json::from_str(&text[begin..end]).unwrap_or_default();
        // Over the colon.
        let value = skip_blanks(bytes, skip_blanks(bytes, end) + 1);
        at = value_end(bytes, value);
        all.push(Member { name, whole: begin..at, value: value..at });
        at = skip_blanks(bytes, at);
        if bytes.get(at) == Some(&b',') {
            at = skip_blanks(bytes, at + 1);
        }
    }
    all
}

fn string_end(bytes: &[u8], begin: usize) -> usize {
    let mut at = begin + 1;
    while let Some(byte) = bytes.get(at) {
        at += match byte {
            b'\\' => 2,
            b'"' => return at + 1,
            _ => 1,
        };
    }
    bytes.len()
}

fn value_end(bytes: &[u8], begin: usize) -> usize {
    let (mut at, mut depth) = (begin, 0_usize);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => {
                at = string_end(bytes, at);
                if depth == 0 {
                    return at;
                }
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            b',' if depth == 0 => return at,
            byte if byte.is_ascii_whitespace() && depth == 0 => return at,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

fn replaced(text: &str, range: Range<usize>, by: &str) -> String {
    [&text[..range.start], by, &text[range.end..]].concat()
}

/// `end`: before the brace that closes an object which was empty.
fn inserted(text: &str, open: usize, member: &str, is_empty: bool, end: &str) -> String {
    let (begin, rest) = text.split_at(open + 1);
    if is_empty { [begin, member, end, rest.trim_start()].concat() } else { [begin, member, ",", rest].concat() }
}

/// Without a member and one comma beside it. An object that has no other is empty then.
fn removed(text: &str, open: usize, members: &[Member], at: usize) -> String {
    let end = members[at].whole.end;
    let range = match (at.checked_sub(1).and_then(|before| members.get(before)), members.get(at + 1)) {
        (None, None) => open + 1..skip_blanks(text.as_bytes(), end),
        // Over the comma.
        (None, Some(_)) => open + 1..skip_blanks(text.as_bytes(), end) + 1,
        (Some(before), _) => before.whole.end..end,
    };
    replaced(text, range, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRAM: &str = "/usr/bin/freeflow-runtime";

    fn with(text: &str) -> String {
        with_runtime(text, PROGRAM).unwrap().unwrap()
    }

    #[test]
    fn the_rest_of_the_file_stays_as_it_is_and_comes_back() {
        for text in [
            "{}",
            "{\n}\n",
            "{\"log-driver\":\"journald\"}",
            "{\n\t\"unknown-key\": [1, {\"}\": \"]\\\"{\"}],\n\t\"max\": 123456789012345678901234567890\n}\n",
            "{ \"runtimes\": {\"kata\": {\"path\": \"/kata\"}}, \"z\": null }",
            "{\"a\": 1, \"runtimes\": {\n  \"kata\": {\"path\": \"/k\"},\n  \"other\": {}\n}, \"b\": 2.50}",
        ] {
            let changed = with(text);
            let settings: Value = serde_json::from_str(&changed).unwrap();
            assert_eq!(settings[RUNTIMES][RUNTIME], json!({"path": PROGRAM}), "{changed}");
            assert_eq!(with_runtime(&changed, PROGRAM).unwrap(), None, "{changed}");
            let back = without_runtime(&changed, PROGRAM).unwrap().unwrap();
            let expected = if text.starts_with("{\n}") { "{}\n" } else { text };
            assert_eq!(back, expected, "{changed}");
        }
        assert_eq!(
            with(""),
            "{\n  \"runtimes\": {\n    \"freeflow\": {\"path\":\"/usr/bin/freeflow-runtime\"}\n  }\n}\n"
        );
    }

    #[test]
    fn of_an_object_in_the_middle_its_commas_go_too() {
        let text =
            format!("{{\"runtimes\": {{\"a\": {{}}, \"freeflow\": {{\"path\": \"{PROGRAM}\"}} , \"b\": {{}}}}}}");
        assert_eq!(without_runtime(&text, PROGRAM).unwrap().unwrap(), "{\"runtimes\": {\"a\": {} , \"b\": {}}}");
        let text = format!("{{\"x\": 1, \"runtimes\": {{\"freeflow\": {{\"path\": \"{PROGRAM}\"}}}}}}");
        assert_eq!(without_runtime(&text, PROGRAM).unwrap().unwrap(), "{\"x\": 1}");
        assert_eq!(without_runtime("{\"runtimes\": {}}", PROGRAM).unwrap(), None);
        let other = "{\"runtimes\": {\"freeflow\": {\"path\": \"/opt/bin/freeflow-runtime\"}}}";
        assert_eq!(without_runtime(other, PROGRAM).unwrap(), None, "another installation's");
    }

    #[test]
    fn another_installation_s_is_replaced_and_what_is_foreign_refused() {
        let other = "{\"runtimes\": {\"freeflow\": {\"path\": \"/opt/bin/freeflow-runtime\", \"runtimeArgs\": []}}}";
        assert_eq!(with(other), format!("{{\"runtimes\": {{\"freeflow\": {{\"path\":\"{PROGRAM}\"}}}}}}"));
        for text in [
            "{",
            "[]",
            "{\"a\": 1,}",
            "{\"runtimes\": 3}",
            "{\"runtimes\": {\"freeflow\": {\"path\": \"/bin/other\"}}}",
            "{\"runtimes\": {\"freeflow\": {}}}",
            "{\"runtimes\": {\"a\": {}}, \"runtimes\": {}, \"runtimes\": {\"freeflow\": 1}}",
            "\u{feff}{}",
        ] {
            assert!(with_runtime(text, PROGRAM).is_err(), "{text}");
        }
        let text = format!(
            "{{\"default-runtime\": \"freeflow\", \"runtimes\": {{\"freeflow\": {{\"path\": \"{PROGRAM}\"}}}}}}"
        );
        assert!(without_runtime(&text, PROGRAM).unwrap_err().to_string().contains("default-runtime"));
        let twice = format!(
            "{{\"runtimes\": {{\"freeflow\": {{}}}}, \"runtimes\": {{\"freeflow\": {{\"path\": \"{PROGRAM}\"}}}}}}"
        );
        assert!(without_runtime(&twice, PROGRAM).is_err(), "what stood before would come to light");
    }

    #[test]
    fn a_file_keeps_its_mode_and_a_link_stays_one() {
        let directory = std::env::temp_dir().join(format!("freeflow-docker-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let (file, link) = (directory.join("real.json"), directory.join("daemon.json"));
        fs::write(&file, "{\"a\": 1}").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink("real.json", &link).unwrap();
        let mark = directory.join("mark");
        register(&link, Some(&mark)).unwrap();
        assert!(mark.exists() && link.is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        let registered = fs::read_to_string(&file).unwrap();
        assert!(registered.contains(RUNTIME));
        // The operator has taken it out.
        fs::write(&file, "{\"a\": 1}").unwrap();
        register(&link, Some(&mark)).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "{\"a\": 1}");
        fs::write(&file, registered).unwrap();
        unregister(&link, Some(&mark)).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "{\"a\": 1}");
        assert!(!mark.exists());
        fs::write(&mark, "/opt/bin/freeflow-runtime").unwrap();
        unregister(&link, Some(&mark)).unwrap();
        assert!(mark.exists(), "it is another installation's");
        assert!(write(&link, "of before", "{}").is_err(), "it was changed meanwhile");
        assert_eq!(fs::read_to_string(&file).unwrap(), "{\"a\": 1}");
        let new = directory.join("etc/daemon.json");
        register(&new, None).unwrap();
        assert_eq!(fs::metadata(&new).unwrap().mode() & 0o777, FILE_MODE);
        unregister(&new, None).unwrap();
        assert!(!new.exists(), "it was made for the runtime alone");
        fs::remove_dir_all(&directory).unwrap();
    }
}
