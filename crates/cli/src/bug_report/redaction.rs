//! The last of the walls between secrets and a report: whatever was collected, texts that look like secrets are taken
//! out of it. The first wall is that nothing is collected that is known to hold any (`super`).

use serde_json::Value;

/// Stands where something was taken out.
pub const REMOVED: &str = "[removed]";
/// Begin of a token by which hosts join a cluster.
const TOKEN_FORM: &str = "ff1.";
/// Parts of the names of settings whose values are nobody's business.
const SECRET_NAMES: [&str; 9] =
    ["password", "passwd", "passphrase", "secret", "token", "private", "credential", "authorization", "api_key"];
const PEM_BEGIN: &str = "-----BEGIN ";
const PEM_END: &str = "-----END ";

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    SECRET_NAMES.iter().any(|secret| name.contains(secret)) || name == "apikey"
}

/// A word's last part that is like a name: `"--db-password` of `"--db-password=x`.
fn name_before(text: &str) -> &str {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-');
    let trimmed = text.trim_end_matches(['"', '\'', ' ']);
    let begin = trimmed.rfind(|letter| !is_of_name(letter)).map_or(0, |at| at + 1);
    // A letter of several bytes before the name.
    trimmed.get(begin..).unwrap_or("")
}

/// Whether a line names a secret (`"name": "DB_PASSWORD"`) whose value stands in another place of it, or in the next
/// one.
fn names_secret(text: &str) -> bool {
    let mut words = text.split([':', '=', ',', '{', '}']).map(|part| part.trim().trim_matches(['"', '\'']));
    let mut is_name = false;
    words.any(|word| {
        let is_secret = is_name && is_secret_name(word);
        is_name = matches!(last_word(word).to_ascii_lowercase().as_str(), "name" | "key");
        is_secret
    })
}

fn last_word(text: &str) -> &str {
    text.rsplit([' ', '"', '\'']).next().unwrap_or(text)
}

/// The place behind an option of such a name, where its value stands: behind a blank, or as the next word of a list.
fn option_end(text: &str) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = text[from..].find('-').map(|at| from + at) {
        let length = text[at..].find(|letter: char| letter.is_whitespace() || "=\"'".contains(letter));
        let end = length.map_or(text.len(), |length| at + length);
        let is_first =
            text[..at].chars().next_back().is_none_or(|letter| letter.is_whitespace() || "\"'=[".contains(letter));
        let value = text[end..].trim_start_matches(['"', '\'', ',', ' ', '\t']);
        let has_value = value.len() < text[end..].len() && !value.trim_matches([']', ' ']).is_empty();
        if is_first && has_value && is_secret_name(&text[at..end]) {
            return Some(text.len() - value.len());
        }
        from = end.max(at + 1);
    }
    None
}

/// One line of text, without the values of settings that have such names, tokens, and passwords in addresses.
/// `is_value_secret`: the line before has named a secret.
fn line(text: &str, is_value_secret: bool) -> String {
    let mut kept = text.to_owned();
    let is_value_secret = is_value_secret || names_secret(text);
    for separator in ['=', ':'] {
        let mut from = 0;
        while let Some(at) = kept[from..].find(separator).map(|at| from + at) {
            let value_at = at + separator.len_utf8();
            from = value_at;
            let name = name_before(&kept[..at]);
            let is_secret = is_secret_name(name) || is_value_secret && name.eq_ignore_ascii_case("value");
            if is_secret && !kept[value_at..].trim().is_empty() {
                // To the end of the line: a value may have blanks.
                kept.truncate(value_at);
                kept.push_str(REMOVED);
                break;
            }
        }
    }
    if let Some(at) = option_end(&kept).filter(|at| kept[*at..].trim() != REMOVED) {
        kept.truncate(at);
        kept.push_str(REMOVED);
    }
    while let Some(at) = kept.find(TOKEN_FORM) {
        let end = kept[at..].find(|letter: char| letter.is_whitespace() || letter == '"');
        kept.replace_range(at..end.map_or(kept.len(), |end| at + end), REMOVED);
    }
    without_user(&kept)
}

/// `https://user:password@host` without what stands before the host.
fn without_user(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        kept.push_str(before);
        let end = after.find(|letter: char| letter.is_whitespace() || matches!(letter, '/' | '"' | '\''));
        let authority = &after[..end.unwrap_or(after.len())];
        let host = authority.rfind('@').map_or(0, |at| at + 1);
        if host > 0 {
            kept.push_str(REMOVED);
            kept.push('@');
        }
        rest = &after[host..];
    }
    kept + rest
}

/// A text without what looks like a secret.
pub fn text(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let (mut is_in_pem, mut is_value_secret) = (false, false);
    for each in text.split_inclusive('\n') {
        // An encoded key may stand in one line, with `\n` spelt out.
        let begins = each.contains(PEM_BEGIN);
        if begins || is_in_pem {
            if begins && !is_in_pem {
                kept.push_str(REMOVED);
                kept.push('\n');
            }
            // One may end and another begin in the same line.
            is_in_pem = match (each.rfind(PEM_BEGIN), each.rfind(PEM_END)) {
                (Some(begin), end) => end < Some(begin),
                (None, end) => end.is_none(),
            };
            continue;
        }
        let (content, end) = each.strip_suffix('\n').map_or((each, ""), |content| (content, "\n"));
        kept.push_str(&line(content, is_value_secret));
        kept.push_str(end);
        is_value_secret = names_secret(content);
    }
    kept
}

/// The same of a document: values of such names, and of annotations, go whole; texts are looked through.
pub fn document(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let named = |(name, value): (&String, &Value)| {
                ["name", "key"].iter().any(|known| name.eq_ignore_ascii_case(known))
                    && value.as_str().is_some_and(is_secret_name)
            };
            // As environment variables of a container are listed.
            let is_value_secret = fields.iter().any(named);
            let kept = |(name, value): (String, Value)| {
                let is_text = !(value.is_number() || value.is_boolean() || value.is_null());
                let is_secret = is_secret_name(&name) || is_value_secret && name.eq_ignore_ascii_case("value");
                let goes = is_secret && is_text || name == "annotations" && !value.is_null();
                let value = if goes { REMOVED.into() } else { document(value) };
                (name, value)
            };
            Value::Object(fields.into_iter().map(kept).collect())
        }
        Value::Array(items) => match items.as_slice() {
            // As labels are listed.
            [Value::String(name), Value::String(_)] if is_secret_name(name) => {
                Value::Array(vec![name.as_str().into(), REMOVED.into()])
            }
            _ => words(items),
        },
        Value::String(string) => Value::String(text(&string)),
        other => other,
    }
}

/// Items of a list, which may be a command line.
fn words(items: Vec<Value>) -> Value {
    let mut is_value = false;
    let kept = items.into_iter().map(|item| {
        let goes = is_value && item.is_string();
        let is_option = |word: &str| word.starts_with('-') && !word.contains('=') && is_secret_name(word);
        is_value = item.as_str().is_some_and(is_option);
        if goes { REMOVED.into() } else { document(item) }
    });
    Value::Array(kept.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        for (before, after) in [
            ("peer h2 is up", "peer h2 is up"),
            ("DB_PASSWORD=hunter2 and more", "DB_PASSWORD=[removed]"),
            ("\"authToken\": \"abc\",", "\"authToken\":[removed]"),
            ("--join ff1.abc.def --host h", "--join [removed] --host h"),
            ("Authorization: Bearer x", "Authorization:[removed]"),
            (
                "etcd https://u:p@10.0.0.1:2379, https://10.0.0.2",
                "etcd https://[removed]@10.0.0.1:2379, https://10.0.0.2",
            ),
            ("ä=b, token:", "ä=b, token:"),
            ("token create: done", "token create: done"),
            ("etcd --db-password hunter2 --x y", "etcd --db-password [removed]"),
            ("etcd --password=hunter2 --x y", "etcd --password=[removed]"),
            ("[\"etcd\", \"--token\", \"x\"]", "[\"etcd\", \"--token\", \"[removed]"),
            ("[\"etcd\", \"--token\"]", "[\"etcd\", \"--token\"]"),
            ("the option --token is unknown", "the option --token [removed]"),
            ("x --join-token", "x --join-token"),
            ("a no-secret here", "a no-secret here"),
            ("{\"name\":\"DB_PASSWORD\",\"value\":\"x\"}", "{\"name\":\"DB_PASSWORD\",\"value\":[removed]"),
            ("name: db, value: 3", "name: db, value: 3"),
            ("- name: API_TOKEN\n  value: x\n  value: y", "- name: API_TOKEN\n  value:[removed]\n  value: y"),
        ] {
            assert_eq!(text(before), after, "{before}");
        }
        let pem = "a\n-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\nb\n";
        assert_eq!(text(pem), "a\n[removed]\nb\n");
        assert_eq!(text("x -----BEGIN A-----\nrest without an end\n"), "[removed]\n");
        let value = json!({"annotations": {"a": "b"}, "secretName": "s", "tokens": 3, "list": ["ff1.x", "y"],
            "labels": [["access-token", "x"], ["role", "db"]],
            "env": [{"name": "DB_PASSWORD", "value": "x"}, {"name": "MODE", "value": "y"}],
            "args": ["etcd", "--password", "x", "--name", "y"]});
        let kept = json!({"annotations": REMOVED, "secretName": REMOVED, "tokens": 3, "list": [REMOVED, "y"],
            "labels": [["access-token", REMOVED], ["role", "db"]],
            "env": [{"name": "DB_PASSWORD", "value": REMOVED}, {"name": "MODE", "value": "y"}],
            "args": ["etcd", "--password", REMOVED, "--name", "y"]});
        assert_eq!(document(value), kept);
    }
}
