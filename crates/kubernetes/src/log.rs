//! Lines on stderr, which Kubernetes keeps as the pod's log.
//!
//! Names and texts of tenants stand in them: control characters are escaped, so that one line stays one line.

/// Longest line, bytes.
const LINE_BYTES_MAX: usize = 4096;

/// Text without control characters and not longer than a line may be.
pub fn printable(text: &str) -> String {
    let mut line = String::new();
    for character in text.chars() {
        if line.len() > LINE_BYTES_MAX {
            line.push('…');
            break;
        }
        match character {
            // A chain of causes is a line.
            '\n' => line.push_str("; "),
            other if other.is_control() => line.extend(other.escape_default()),
            other => line.push(other),
        }
    }
    line
}

/// Writes a line.
pub fn line(text: &str) {
    eprintln!("{}", printable(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stays_a_line() {
        assert_eq!(printable("a\nb\u{1b}[31m"), "a; b\\u{1b}[31m");
        assert!(printable(&"x".repeat(1 << 20)).len() < LINE_BYTES_MAX + 10);
    }
}
