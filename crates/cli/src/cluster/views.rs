//! Hosts of a cluster and their vNICs, as each host says of itself, as objects: for `get`, `ps` and `top`.
use freeflow_cluster::{Followed, HostVnic, HostVnics, View};
use freeflow_orchestrator::objects::API_VERSION;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The vNICs that hosts have, each with its host and the age of what that said. One that has moved is no more where it
/// was, once the host that has its place says that it is there: the former one has not spoken since.
pub fn vnics(view: &View) -> Vec<Value> {
    let is_said_by = |host: &str, name: &str| {
        view.vnics().get(host).is_some_and(|said| said.vnics.iter().any(|vnic| vnic.name == name))
    };
    let places = view.places().iter().filter(|(name, (_, place))| is_said_by(&place.host, name));
    let places: BTreeMap<&str, &str> = places.map(|(name, (_, place))| (name.as_str(), place.host.as_str())).collect();
    let is_there = |host: &str, name: &str| places.get(name).is_none_or(|place| *place == host);
    let of_host = |(host, said): (&String, &HostVnics)| {
        let present = said.vnics.iter().filter(|vnic| is_there(host, &vnic.name));
        present.map(|vnic| of_vnic(host, said.age_s(), vnic)).collect::<Vec<_>>()
    };
    view.vnics().iter().filter(|(host, _)| view.hosts().contains_key(*host)).flat_map(of_host).collect()
}

fn of_vnic(host: &str, age_s: u64, vnic: &HostVnic) -> Value {
    let container = vnic.container.as_ref().map(|container| {
        json!({
            "name": container.name,
            "engine": container.engine,
            "pid": container.pid,
            "program": container.program,
            "sinceSeconds": container.since_s,
        })
    });
    let traffic = &vnic.traffic;
    json!({
        "apiVersion": API_VERSION,
        "kind": "Vnic",
        "metadata": {"name": vnic.name},
        "spec": {"network": vnic.network, "addresses": vnic.addresses},
        "status": {
            "host": host,
            "ageSeconds": age_s,
            "title": vnic.title,
            "tenant": vnic.tenant,
            "phase": vnic.phase,
            "container": container,
            "traffic": {
                "messagesPerSecond": traffic.messages_per_s,
                "bitsPerSecondOut": traffic.bits_out_per_s,
                "bitsPerSecondIn": traffic.bits_in_per_s,
                "path": traffic.path,
                "heldPercent": traffic.held_percent,
                "errors": traffic.errors,
                "drops": traffic.drops,
            },
        },
    })
}

/// The hosts, as `cluster status` knows them.
pub fn hosts(view: &View) -> Vec<Value> {
    let names: BTreeSet<&String> = view.hosts().keys().chain(view.followed().keys()).collect();
    let one = |name: &String| {
        let (record, followed, vnics) = (view.hosts().get(name), view.followed().get(name), view.vnics().get(name));
        let problems = followed.map(|followed| followed.problems.iter().map(ToString::to_string).collect::<Vec<_>>());
        let follows = match followed {
            Some(followed) if followed.revision >= view.declared_revision().0 => "all",
            Some(_) => "not all yet",
            None => "nothing yet",
        };
        let drained = view.drained().get(name);
        let follows = if drained.is_some() { format!("{follows}, drained") } else { follows.to_owned() };
        json!({
            "apiVersion": API_VERSION,
            "kind": "Host",
            "metadata": {"name": name},
            "spec": {},
            "status": {
                "address": record.map(|(_, record)| record.address),
                "follows": follows,
                "drainedBy": drained.map(|drained| &drained.by),
                "ageSeconds": followed.map(Followed::age_s),
                "version": followed.map(|followed| &followed.release),
                "vnicCount": vnics.map(|vnics| (vnics.vnics.len() as u64).saturating_add(vnics.left_out)),
                "vnicsLeftOut": vnics.map(|vnics| vnics.left_out),
                "problems": problems.unwrap_or_default(),
            },
        })
    };
    names.into_iter().map(one).collect()
}

/// An object of these without what goes on changing by itself.
pub fn still(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        status.remove("ageSeconds");
        status.remove("traffic");
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_cluster::{News, Scope};
    use freeflow_orchestrator::Revision;
    use freeflow_orchestrator::store::Entry;

    #[test]
    fn a_vnic_that_has_moved_is_where_its_place_is() {
        let mut view = View::new("/freeflow", Scope::Vnics);
        let put = |view: &mut View, key: &str, value: Value| {
            let (key, value) = (format!("/freeflow/{key}"), value.to_string().into_bytes());
            let (created, modified) = (Revision(1), Revision(2));
            let entry = Entry { key: key.clone(), value, created, modified, lease: None };
            view.take(News::Changed(Revision(2), vec![(key, Some(entry))]));
        };
        let said = json!({"at_s": 1, "vnics": [
            {"name": "database", "title": "t", "network": "blue", "addresses": ["10.50.224.2"]}]});
        for number in 1..=2 {
            let record = json!({"address": format!("192.0.2.{number}"), "control_port": 4790,
                "public_key": format!("{number:064x}"), "default_range": format!("10.111.{number}.0/24")});
            put(&mut view, &format!("hosts/h{number}/data/record"), record);
        }
        let hosts = |view: &View| {
            let host = |vnic: &Value| vnic["status"]["host"].as_str().unwrap_or_default().to_owned();
            vnics(view).iter().map(host).collect::<Vec<_>>()
        };
        put(&mut view, "vnics/h1/data/0", said.clone());
        put(&mut view, "places/data/database", json!({"host": "h2", "addresses": ["10.50.224.2"]}));
        assert_eq!(hosts(&view), ["h1"], "the next host has not spoken");
        put(&mut view, "vnics/h2/data/0", said);
        assert_eq!(hosts(&view), ["h2"]);
    }

    #[test]
    fn age_is_no_change() {
        let vnic = HostVnic { name: "a".into(), ..HostVnic::default() };
        let (one, two) = (of_vnic("h1", 1, &vnic), of_vnic("h1", 9, &vnic));
        assert!(one != two && still(&one) == still(&two) && still(&one) != still(&of_vnic("h2", 1, &vnic)));
    }
}
