//! Which sockets become rsockets: `/etc/rdma/rsocket/preload_config`, in rdma-core's format.
//!
//! ```text
//! # program domain type protocol; * is any
//! iperf3 INET STREAM *
//! ```
//! Without the file: streams. (rdma-core takes datagrams as well, which breaks programs that ask
//! name servers.)
use libc::c_int;
use std::sync::OnceLock;

const FILE: &str = "/etc/rdma/rsocket/preload_config";

#[derive(Debug, PartialEq, Eq)]
struct Rule {
    program: Option<String>,
    domain: Option<c_int>,
    kind: Option<c_int>,
    protocol: Option<c_int>,
}

fn word(word: &str, prefixes: &[&str], values: &[(&str, c_int)]) -> Option<Option<c_int>> {
    let upper = word.to_ascii_uppercase();
    let bare = prefixes.iter().find_map(|prefix| upper.strip_prefix(prefix)).unwrap_or(&upper);
    if bare == "*" {
        return Some(None);
    }
    values.iter().find(|(name, _)| *name == bare).map(|(_, value)| Some(*value))
}

/// A line; `None`: a comment, or nothing that we know.
fn parse(line: &str) -> Option<Rule> {
    let mut words = line.split_whitespace();
    let program = words.next().filter(|word| !word.starts_with('#'))?;
    let domain = word(words.next()?, &["AF_", "PF_"], &[("INET", libc::AF_INET), ("INET6", libc::AF_INET6)])?;
    let kind = word(words.next()?, &["SOCK_"], &[("STREAM", libc::SOCK_STREAM), ("DGRAM", libc::SOCK_DGRAM)])?;
    let protocol = word(words.next()?, &["IPPROTO_"], &[("TCP", libc::IPPROTO_TCP), ("UDP", libc::IPPROTO_UDP)])?;
    Some(Rule { program: (program != "*").then(|| program.to_ascii_lowercase()), domain, kind, protocol })
}

impl Rule {
    fn matches(&self, program: &str, domain: c_int, kind: c_int, protocol: c_int) -> bool {
        let same = |rule: Option<c_int>, value: c_int| rule.is_none_or(|rule| rule == value);
        // As rdma-core does: the rule's name begins the program's.
        self.program.as_ref().is_none_or(|rule| program.to_ascii_lowercase().starts_with(rule.as_str()))
            && same(self.domain, domain)
            && same(self.kind, kind)
            && same(self.protocol, protocol)
    }
}

fn decide(rules: &[Rule], program: &str, domain: c_int, kind: c_int, protocol: c_int) -> bool {
    let usual = match kind {
        libc::SOCK_STREAM => libc::IPPROTO_TCP,
        libc::SOCK_DGRAM => libc::IPPROTO_UDP,
        _ => return false,
    };
    if !matches!(domain, libc::AF_INET | libc::AF_INET6) || (protocol != 0 && protocol != usual) {
        return false;
    }
    if rules.is_empty() {
        return kind == libc::SOCK_STREAM;
    }
    rules.iter().any(|rule| rule.matches(program, domain, kind, usual))
}

/// Whether this program's socket is to be an rsocket; `kind` without its flags.
pub fn wants_rsocket(domain: c_int, kind: c_int, protocol: c_int) -> bool {
    static RULES: OnceLock<(Vec<Rule>, String)> = OnceLock::new();
    let (rules, program) = RULES.get_or_init(|| {
        let text = std::fs::read_to_string(FILE).unwrap_or_default();
        let program = std::env::args_os().next().unwrap_or_default();
        let program = std::path::Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
        (text.lines().filter_map(parse).collect(), program)
    });
    decide(rules, program, domain, kind, protocol)
}

#[cfg(test)]
mod tests {
    use super::*;
    use libc::{AF_INET, AF_INET6, AF_UNIX, SOCK_DGRAM, SOCK_STREAM};

    #[test]
    fn rules_and_what_they_mean() {
        assert!(decide(&[], "x", AF_INET, SOCK_STREAM, 0) && !decide(&[], "x", AF_INET, SOCK_DGRAM, 0));
        assert!(!decide(&[], "x", AF_UNIX, SOCK_STREAM, 0) && !decide(&[], "x", AF_INET, SOCK_STREAM, 132));
        let rules: Vec<Rule> = ["# iperf3 * * *", "iperf AF_INET STREAM tcp", "short * *", "Redis * * *", "q IB * *"]
            .into_iter()
            .filter_map(parse)
            .collect();
        assert_eq!(rules.len(), 2);
        assert!(
            decide(&rules, "iperf3", AF_INET, SOCK_STREAM, 6) && !decide(&rules, "iperf3", AF_INET6, SOCK_STREAM, 0)
        );
        assert!(
            decide(&rules, "redis-server", AF_INET6, SOCK_DGRAM, 0) && !decide(&rules, "curl", AF_INET, SOCK_STREAM, 0)
        );
    }
}
