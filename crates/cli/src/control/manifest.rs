//! The files that `-f` names, as objects to be sent.
//!
//! Files are bounded in bytes and number here, in nodes and depth by the parser (`freeflow-manifest`).
use super::api::EXIT_REFUSED;
use super::kinds::Kind;
use crate::failure::{Context, Failure, Result, fail};
use freeflow_manifest::{ITEM_COUNT_MAX, Item, parse};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Of all files of a call together.
const BYTES_MAX: u64 = 8 << 20;
const FILE_COUNT_MAX: usize = 1024;
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// A failure of the file: the router would refuse it as well.
fn refused(why: impl ToString) -> Failure {
    Failure::new(why.to_string()).with_code(EXIT_REFUSED)
}

/// All objects of `-f`: a file, the YAML and JSON files of a folder in order of name, or `-` for standard input.
pub fn read(paths: &[PathBuf]) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    let mut left = BYTES_MAX;
    for path in paths {
        for (name, text) in texts(path, &mut left)? {
            items.extend(parse(&name, &text).map_err(refused)?);
            if items.len() > ITEM_COUNT_MAX {
                fail!("{name}: these are more than {ITEM_COUNT_MAX} objects; apply them in parts");
            }
        }
    }
    if items.is_empty() {
        return Err(refused("there is no object in what -f names"));
    }
    let mut seen = BTreeMap::new();
    for item in &items {
        if let Some(first) = seen.insert((item.kind.plural(), item.name.as_str()), item) {
            let kind = Kind::of(item.kind).singular();
            let text = format!("{}: {kind} {} is in {} already", item.place(""), item.name, first.place(""));
            return Err(refused(text));
        }
    }
    Ok(items)
}

/// Names and contents of the files that a path stands for.
fn texts(path: &Path, left: &mut u64) -> Result<Vec<(String, String)>> {
    if path == Path::new("-") {
        return Ok(vec![("standard input".into(), text_of(std::io::stdin(), "standard input", left)?)]);
    }
    let name = path.display().to_string();
    if !path.is_dir() {
        let file = File::open(path).context(&name)?;
        return Ok(vec![(name.clone(), text_of(file, &name, left)?)]);
    }
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(path).context(&name)? {
        let file = entry.context(&name)?.path();
        let wanted =
            file.extension().and_then(|extension| extension.to_str()).is_some_and(|it| EXTENSIONS.contains(&it));
        if wanted && file.is_file() {
            files.push(file);
        }
        if files.len() > FILE_COUNT_MAX {
            fail!("{name}: more than {FILE_COUNT_MAX} files");
        }
    }
    files.sort();
    let read = |file: PathBuf| {
        let name = file.display().to_string();
        Ok((name.clone(), text_of(File::open(&file).context(&name)?, &name, left)?))
    };
    files.into_iter().map(read).collect()
}

fn text_of(input: impl Read, name: &str, left: &mut u64) -> Result<String> {
    let mut text = String::new();
    input.take(*left + 1).read_to_string(&mut text).context(name)?;
    *left = left
        .checked_sub(text.len() as u64)
        .ok_or_else(|| Failure::new(format!("{name}: these files are longer than {} MiB together", BYTES_MAX >> 20)))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_as_long_as_they_may_be_together() {
        let mut left = 3;
        assert!(text_of(&b"abcd"[..], "x", &mut left).is_err());
        assert_eq!(text_of(&b"abc"[..], "x", &mut left).unwrap(), "abc");
    }
}
