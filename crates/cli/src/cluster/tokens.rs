//! `freeflow cluster authority`, `init` and `token`: how a cluster begins, and who may join it.
use super::{file, reclaims};
use crate::arguments::Format;
use crate::arguments_control::{Authority, ReclaimAfter, TokenAction};
use crate::failure::{Failure, Result, fail};
use crate::record::now_s;
use crate::{names, output};
use freeflow_cluster::{
    AuthorityFiles, CONTROLLER_FILE, ClusterFile, FULL_MESH_COUNT, Operator, RECLAIM_AFTER_DEFAULT_S, Token,
    TokenRecord, TokenTerms, Tokens, Wire, begin_rights, member_name,
};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::Pool;
use serde_json::json;
use std::net::IpAddr;
use std::time::Duration;

/// Of the token that a new cluster begins with.
const FIRST: TokenTerms = TokenTerms { uses: 16, lasts: Duration::from_secs(86_400) };

pub fn authority(asked: &Authority) -> Result<()> {
    let wire = if asked.sealed { Wire::Sealed } else { Wire::Plain };
    if !asked.root.starts_with('/') || asked.root.trim_matches('/').is_empty() {
        fail!("--root {:?}: write a path such as /freeflow", asked.root);
    }
    AuthorityFiles { members: &asked.etcd, root: &asked.root, wire }.make(&asked.directory)?;
    let directory = asked.directory.display();
    output::line(format!("The authority of a cluster is in {directory}: keep it, and its *.key, to yourself."));
    output::line("");
    output::line("etcd, on each of its machines, with ca.pem, peer-ca.pem and the four files of that machine:");
    let url = |address: &IpAddr, port: u16| format!("https://{}", std::net::SocketAddr::new(*address, port));
    let member = |address: &IpAddr| format!("{}={}", member_name(*address), url(address, 2380));
    let all: Vec<String> = asked.etcd.iter().map(member).collect();
    for address in &asked.etcd {
        let name = member_name(*address);
        output::line(format!(
            "  etcd --name {name} --data-dir /var/lib/etcd --initial-cluster {all} --initial-cluster-state new \
             --listen-client-urls {client} --advertise-client-urls {client} --listen-peer-urls {peer} \
             --initial-advertise-peer-urls {peer} --client-cert-auth --trusted-ca-file ca.pem --cert-file {name}.pem \
             --key-file {name}.key --peer-client-cert-auth --peer-trusted-ca-file peer-ca.pem \
             --peer-cert-file {name}-peer.pem --peer-key-file {name}-peer.key",
            all = all.join(","),
            client = url(address, 2379),
            peer = url(address, 2380),
        ));
    }
    output::line("");
    output::line(
        "Whoever has a certificate of peer-ca.pem is etcd's root: peer-ca.key is for new members of etcd alone.",
    );
    output::line(format!("Next, when etcd is up: freeflow cluster init --cluster {directory}/{CONTROLLER_FILE}"));
    Ok(())
}

pub fn init(
    file: &ClusterFile,
    pool: Option<&str>,
    full_mesh: Option<u32>,
    reclaim_after: Option<ReclaimAfter>,
) -> Result<()> {
    let parsed = |text: &str| {
        let range = text.parse::<Pool>().ok().filter(|pool| (8..=24).contains(&pool.prefix_length()));
        range.ok_or_else(|| Failure::new(format!("--pool {text:?}: write a range such as 10.111.0.0/16, of /8 to /24")))
    };
    let pool = pool.map(parsed).transpose()?;
    if let Some(new) = begin_rights(file)? {
        let made = match new.is_empty() {
            true => "its users were there already".to_owned(),
            false => format!("its users {} are made", new.join(", ")),
        };
        output::line(format!("Rights count in etcd; {made}."));
    }
    let own = file.as_own();
    let (full, after_s) = (
        full_mesh.unwrap_or(FULL_MESH_COUNT),
        reclaim_after.map_or(Some(RECLAIM_AFTER_DEFAULT_S), |ReclaimAfter(seconds)| seconds),
    );
    let (identity, is_new) = Operator::init_with(&own, &names::digits::<8>()?, pool, full, after_s)?;
    let is = if is_new { "is made" } else { "is there already" };
    output::line(format!("Cluster {} {is} in etcd, under {}.", identity.id, file.root));
    if let Some(pool) = pool.filter(|pool| identity.pool != Some(pool.to_string())) {
        let kept = identity.pool.as_deref().unwrap_or(freeflow_cluster::DEFAULT_POOL);
        fail!("--pool {pool}: the cluster that is there has {kept} for the network default, and keeps that");
    }
    if let Some(count) = full_mesh.filter(|count| identity.full_mesh != *count) {
        fail!("--full-mesh {count}: the cluster that is there has {}, and keeps that", identity.full_mesh);
    }
    match reclaim_after {
        Some(_) if !is_new => {
            fail!("--reclaim-after: the cluster that is there keeps its own; freeflow cluster set changes it");
        }
        _ if is_new => output::line(reclaims(after_s)),
        _ => {}
    }
    if file.authority.is_none() && file.cacert.is_some() {
        output::line("Next, on each host: freeflow up --cluster FILE --address IP --range CIDR --host NAME");
        return Ok(());
    }
    output::line("Next, on the first host, a controller, with this cluster file and the files that it names:");
    output::line("  freeflow up --cluster FILE --host NAME");
    if !is_new {
        output::line("Tokens for other hosts: freeflow cluster token create --cluster FILE");
        return Ok(());
    }
    let token = Tokens::open(file)?.create(FIRST)?;
    output::line(format!("Then on each other host, up to {} within a day:", FIRST.uses));
    output::line(format!("  freeflow up --host NAME --join {}", token.to_text()));
    Ok(())
}

pub fn tokens(run_dir: &RunDir, action: TokenAction) -> Result<()> {
    match action {
        TokenAction::Create { uses, expires, of } => {
            let token = create(&file(run_dir, &of)?, TokenTerms { uses, lasts: expires })?;
            output::line(token.to_text());
            Ok(())
        }
        TokenAction::List { of, output } => list(&open(&file(run_dir, &of)?)?, output.format),
        TokenAction::Revoke { id, of } => {
            open(&file(run_dir, &of)?)?.revoke(&id)?;
            output::line(format!("Nobody joins by the token {id} any more; hosts that have joined by it stay."));
            Ok(())
        }
    }
}

/// Of a cluster that there is.
fn open(file: &ClusterFile) -> Result<Tokens> {
    Operator::open(file)?;
    Ok(Tokens::open(file)?)
}

fn create(file: &ClusterFile, terms: TokenTerms) -> Result<Token> {
    Ok(open(file)?.create(terms)?)
}

fn list(tokens: &Tokens, format: Format) -> Result<()> {
    let all = tokens.list()?;
    let now_s = now_s();
    if format == Format::Json {
        let row = |(id, record): &(String, TokenRecord)| json!({"id": id, "uses_left": record.uses_left, "expires_s": record.expires_s, "used_by": record.used_by});
        output::json(&all.iter().map(row).collect::<Vec<_>>());
        return Ok(());
    }
    let mut rows = vec![["TOKEN", "USES LEFT", "EXPIRES", "USED BY"].map(String::from).to_vec()];
    for (id, record) in &all {
        let expires = match record.expires_s.checked_sub(now_s) {
            Some(left_s) if left_s > 0 => format!("in {}", output::duration(left_s)),
            _ => "has expired".into(),
        };
        let used_by = if record.used_by.is_empty() { "-".into() } else { record.used_by.join(",") };
        rows.push(vec![id.clone(), record.uses_left.to_string(), expires, used_by]);
    }
    output::table(&rows);
    Ok(())
}
