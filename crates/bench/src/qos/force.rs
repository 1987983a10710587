//! How long after `freeflow apply` (or `delete`) has begun a change is in force: the time of the
//! command itself is a part of it.
use super::flow::{Class, Flow};
use super::series::{Run, Wanted};
use crate::host::Freeflow;
use crate::stats::median;
use crate::sys;
use crate::verbs::following::Sign;

/// Changes of each kind in a run.
const CHANGES: usize = 20;
/// The promised time.
const LIMIT_MS: f64 = 100.0;
/// Two messages at this rate take a tenth of a second.
const LOW_MBIT: u32 = 10;

const RULE: &str = "apiVersion: freeflow.io/v1\nkind: AccessRule\nmetadata: {name: flow-1}\nspec: {from: {}, to: {}, action: allow}\n---\n";
const QUOTA: &str =
    "apiVersion: freeflow.io/v1\nkind: Quota\nmetadata: {name: flow-1}\nspec: {perVnic: {qps: 1}}\n---\n";

/// A change, and how the program learns of it.
const KINDS: [(&str, Sign); 3] =
    [("a lower rate", Sign::Slow), ("a rule withdrawn", Sign::Cut), ("a quota used up", Sign::Refused)];

pub fn wanted() -> Vec<Wanted> {
    let one = |what: &str, which: &str| Wanted {
        what: format!("{what}, {which} of {CHANGES}"),
        limit: "the promise",
        unit: "ms",
        at_least: None,
        at_most: Some(1.0),
    };
    KINDS.iter().flat_map(|(what, _)| [one(what, "median"), one(what, "longest")]).collect()
}

fn network(more: &str) -> String {
    format!(
        "apiVersion: freeflow.io/v1\nkind: Network\nmetadata: {{name: flow-1}}\nspec:\n  cidrs: [10.61.1.0/24]\n{more}---\n"
    )
}

/// Everything as before a change.
fn begin(host: &Freeflow, sign: Sign) -> Result<(), String> {
    match sign {
        Sign::Slow => host.apply(&Class::UNCAPPED.declaration(1, "auto")),
        Sign::Cut => host.apply(&format!("{}{RULE}", network("  access: deny\n"))),
        Sign::Refused => host.apply(&network("")),
    }
}

fn change(host: &Freeflow, sign: Sign) -> Result<(), String> {
    match sign {
        Sign::Slow => host.apply(&Class::capped(LOW_MBIT).declaration(1, "auto")),
        Sign::Cut => host.delete("accessrule", "flow-1"),
        Sign::Refused => host.apply(&format!("{QUOTA}{}", network("  quota: flow-1\n"))),
    }
}

/// Milliseconds from the beginning of the command.
fn once(host: &Freeflow, flow: &mut Flow, sign: Sign) -> Result<f64, String> {
    begin(host, sign)?;
    flow.connect()?;
    flow.await_sign(sign)?;
    let before = sys::monotonic_ns();
    change(host, sign)?;
    let at = flow.sign()?;
    flow.release()?;
    if at < before {
        return Err("the program saw a change before there was one".to_owned());
    }
    Ok((at - before) as f64 / 1e6)
}

pub fn changes(host: &Freeflow, flow: &mut Flow) -> Result<Vec<Run>, String> {
    let mut runs = Vec::new();
    for (_, sign) in KINDS {
        let times: Vec<f64> = (0..CHANGES).map(|_| once(host, flow, sign)).collect::<Result<_, _>>()?;
        let longest = times.iter().copied().reduce(f64::max);
        let both = [median(&times), longest].map(|value| value.ok_or("no changes"));
        for value in both {
            runs.push(Run { value: value?, limit: LIMIT_MS });
        }
    }
    begin(host, Sign::Slow)?;
    Ok(runs)
}
