//! The declared networks' and rules' word on the two ends of a connectivity test: by the same table as the router's,
//! over the objects that the router shows.

use super::asking::Expected;
use crate::control::api::{Api, BASE};
use crate::failure::{Context as _, Failure, Result};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::access::{AccessTable, Known, Party, Profile};
use freeflow_orchestrator::objects::{AccessRuleSpec, GroupSpec, Labels, NetworkSpec};
use serde::de::DeserializeOwned;
use std::net::IpAddr;

/// The declared networks, and the table of the rules.
pub struct Rules {
    table: AccessTable,
    networks: Vec<(String, NetworkSpec)>,
}

/// A vNIC of the test, as its router shows it.
#[derive(Clone, Debug)]
pub struct Member {
    pub network: String,
    pub id: String,
    pub addresses: Vec<IpAddr>,
    pub labels: Labels,
}

fn specs<T: DeserializeOwned>(api: &Api, kind: &str) -> Result<Vec<(String, T)>> {
    let mut answer = api.get(&format!("{BASE}/{kind}")).map_err(Failure::from)?;
    let items = answer["items"].as_array_mut().ok_or_else(|| Failure::new(format!("the router shows no {kind}")))?;
    items
        .iter_mut()
        .map(|item| {
            let name = item["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            Ok((name, serde_json::from_value(item["spec"].take()).context(kind)?))
        })
        .collect()
}

impl Rules {
    pub fn read(run_dir: &RunDir) -> Result<Self> {
        let api = Api::of(run_dir)?;
        let networks: Vec<(String, NetworkSpec)> = specs(&api, "networks")?;
        let groups: Vec<(String, GroupSpec)> = specs(&api, "groups")?;
        let rules: Vec<(String, AccessRuleSpec)> = specs(&api, "accessrules")?;
        Ok(Self::of(networks, &groups, &rules))
    }

    fn of(
        networks: Vec<(String, NetworkSpec)>,
        groups: &[(String, GroupSpec)],
        rules: &[(String, AccessRuleSpec)],
    ) -> Self {
        let table = AccessTable::compile(
            networks.iter().map(|(name, spec)| (name.as_str(), spec)),
            groups.iter().map(|(name, spec)| (name.as_str(), spec)),
            rules.iter().map(|(name, spec)| (name.as_str(), spec)),
        );
        Self { table, networks }
    }

    pub fn networks(&self) -> Vec<&str> {
        self.networks.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn profile(&self, member: &Member, other: &str) -> Profile {
        let known = Known { vnic: &member.id, labels: &member.labels };
        let party = Party { network: &member.network, addresses: &member.addresses, known: Some(known) };
        if member.network == other { self.table.profile(&party) } else { self.table.profile_across(&party, other) }
    }

    pub fn expected(&self, from: &Member, to: &Member, across: bool) -> Expected {
        let (one, other) = (self.profile(from, &to.network), self.profile(to, &from.network));
        Expected {
            connected: self.table.decide_connection(&one, &other).allowed,
            begun: self.table.decide(&one, &other).allowed,
            same_network: from.network == to.network,
            across,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn member(network: &str, tier: &str) -> Member {
        let labels = [("tier".to_owned(), tier.to_owned())].into_iter().collect();
        Member { network: network.into(), id: "v".into(), addresses: vec![[10, 50, 0, 2].into()], labels }
    }

    fn spec<T: DeserializeOwned>(value: serde_json::Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_is_declared_is_expected() {
        let networks = vec![
            ("red".to_owned(), spec(json!({"tenant": "red", "access": "deny"}))),
            ("blue".to_owned(), spec(json!({"tenant": "blue"}))),
        ];
        let rule = json!({"tenant": "red", "from": {"labels": {"tier": "client"}}, "to": {"labels": {"tier": "server"}},
                          "direction": "fromTo", "action": "allow"});
        let rules = Rules::of(networks, &[], &[("r".to_owned(), spec(rule))]);
        let (client, server) = (member("red", "client"), member("red", "server"));
        let verdict = |from: &Member, to: &Member| {
            let expected = rules.expected(from, to, false);
            (expected.connected, expected.begun, expected.same_network)
        };
        assert_eq!(verdict(&client, &server), (true, true, true));
        assert_eq!(verdict(&server, &client), (true, false, true), "a connection by hand stands in either direction");
        assert_eq!(verdict(&client, &client), (false, false, true));
        assert_eq!(verdict(&member("blue", "x"), &member("blue", "y")), (true, true, true));
        assert_eq!(verdict(&member("blue", "x"), &server), (false, false, false), "tenants never meet");
        assert_eq!(rules.networks(), ["red", "blue"]);
    }
}
