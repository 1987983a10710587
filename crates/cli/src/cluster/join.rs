//! `freeflow up` of a host that joins a cluster, or has joined one: where its files come from.
use super::host::{Directory, Joined, Pems};
use crate::arguments::Up;
use crate::failure::{Context, Failure, Result, fail};
use crate::record::now_s;
use crate::{output, router};
use freeflow_cluster::{ClusterError, ClusterFile, HostKey, TOKEN_BYTES_MAX, Token, Welcome, is_host_name};
use freeflow_cluster::{join, join_as_controller, renew};
use freeflow_hostnet::run_dir::{RunDir, Settings};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::Read;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

const JOIN_TIME_S: u64 = 30;

/// By what a host joins.
enum Way {
    Token(Token),
    /// A controller by its own keys.
    Controller(ClusterFile),
}

/// The arguments of a host that joins now, or that has joined and is brought up with nothing of before but its state,
/// as those of a host with a cluster file; other arguments as they are.
pub fn joined<'a>(run_dir: &RunDir, arguments: &'a Up, state: Option<&Path>) -> Result<Cow<'a, Up>> {
    let last = run_dir.settings();
    let state = state.or_else(|| last.as_ref()?.state.as_deref()).unwrap_or(run_dir.path());
    let directory = Directory::at(state);
    let Some(way) = way(arguments, last.as_ref())? else {
        let kept =
            directory.joined().filter(|_| arguments.cluster.is_none() && arguments.peers.is_none() && last.is_none());
        return Ok(kept.map_or(Cow::Borrowed(arguments), |kept| Cow::Owned(with(arguments, &directory, &kept))));
    };
    let of_last = last.as_ref().filter(|last| last.cluster.as_ref() == Some(&directory.cluster_file()));
    if of_last.is_none() && router::recorded(run_dir).is_some() {
        fail!(
            "the host is up, and follows not the cluster that it is to join; first: freeflow{} down",
            run_dir.option()
        );
    }
    let joined = enter(&way, arguments, of_last, &directory)?;
    Ok(Cow::Owned(with(arguments, &directory, &joined)))
}

fn way(arguments: &Up, last: Option<&Settings>) -> Result<Option<Way>> {
    if let Some(text) = &arguments.join {
        return Ok(Some(Way::Token(Token::parse(&token_text(text)?)?)));
    }
    let Some(path) = arguments.cluster.as_ref().filter(|path| path.as_os_str() != "off") else { return Ok(None) };
    let path = fs::canonicalize(path).context(format!("the cluster file {}", path.display()))?;
    let file = ClusterFile::read(&path)?;
    let has_range = arguments.range.is_some() || last.is_some_and(|last| last.cluster.as_ref() == Some(&path));
    let is_way = match file.authority.is_some() {
        true => file.cert.is_none(),
        // Without TLS nobody has keys.
        false => file.controller && file.cacert.is_none() && !has_range,
    };
    if is_way && arguments.range.is_some() {
        fail!("--range: a controller has a block of the cluster's addresses, as all hosts that join; leave it out");
    }
    Ok(is_way.then_some(Way::Controller(file)))
}

/// The token itself, or from where it can't be seen in the list of processes.
fn token_text(text: &str) -> Result<String> {
    let mut read = String::new();
    match text.strip_prefix('@') {
        Some(path) => {
            let what = || format!("--join @{path}");
            let file = File::open(path).context(what())?;
            file.take(TOKEN_BYTES_MAX).read_to_string(&mut read).context(what())?;
        }
        None if text == "-" => {
            let input = std::io::stdin().lock();
            input.take(TOKEN_BYTES_MAX).read_to_string(&mut read).context("--join -")?;
        }
        None => return Ok(text.to_owned()),
    }
    Ok(read)
}

fn with(arguments: &Up, directory: &Directory, joined: &Joined) -> Up {
    Up {
        cluster: Some(directory.cluster_file()),
        join: None,
        host: Some(arguments.host.clone().unwrap_or_else(|| joined.host.clone())),
        address: Some(arguments.address.unwrap_or(joined.address)),
        pool: Some(joined.pool.clone()),
        range: Some(joined.range.clone()),
        ..arguments.clone()
    }
}

/// Has the host admitted, and keeps what it gets.
fn enter(way: &Way, arguments: &Up, last: Option<&Settings>, directory: &Directory) -> Result<Joined> {
    let host = arguments.host.clone().or_else(|| Some(last?.host.clone()));
    let host = host.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    if !is_host_name(&host) {
        fail!("--host {host:?}: a cluster's host has a name of at most 64 letters, digits and -, such as h1");
    }
    let etcd = match way {
        Way::Token(token) => &token.etcd,
        Way::Controller(file) => &file.etcd,
    };
    let address = match arguments.address.or_else(|| last?.address) {
        Some(address) => address,
        None => address_towards(etcd)?,
    };
    directory.make()?;
    let key = HostKey::of(&directory.etcd_key())?;
    let done = match way {
        Way::Token(token) => {
            let wait = Duration::from_secs(arguments.join_time.unwrap_or(JOIN_TIME_S));
            join(token, &host, &key, wait)
        }
        Way::Controller(file) => join_as_controller(file, &host, &key),
    };
    let welcome = match (done, directory.joined()) {
        (Ok(welcome), _) => welcome,
        // It is in already, and goes on as all hosts do without etcd.
        (Err(error @ (ClusterError::Store(_) | ClusterError::Full)), Some(joined)) if joined.host == host => {
            output::complaint(format!("{error}; this host goes on with the certificate that it has"));
            return Ok(Joined { address, ..joined });
        }
        (Err(error), _) => return Err(Failure::new(format!("this host can't join the cluster: {error}"))),
    };
    if let Some(pool) = arguments.pool.as_ref().filter(|pool| **pool != welcome.pool) {
        fail!("--pool {pool}: the cluster's network default has {}; leave it out", welcome.pool);
    }
    let joined = Joined::of(host, address, &welcome);
    keep(way, &joined, &welcome, directory)?;
    Ok(joined)
}

fn keep(way: &Way, joined: &Joined, welcome: &Welcome, directory: &Directory) -> Result<()> {
    let path = |path: &PathBuf| fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let (file, authority): (Value, _) = match way {
        Way::Token(token) => {
            (json!({"etcd": token.etcd, "root": token.root, "wire": token.wire}), token.cacert.clone())
        }
        Way::Controller(file) => {
            let mut value = json!({"etcd": file.etcd, "root": file.root, "wire": file.wire, "controller": true});
            if let Some(keys) = &file.authority {
                value["authority"] = json!({"cert": path(&keys.cert), "key": path(&keys.key),
                    "root_cert": path(&keys.root_cert), "root_key": path(&keys.root_key)});
            }
            let read = |path: &PathBuf| fs::read_to_string(path).context(path.display());
            (value, file.cacert.as_ref().map(read).transpose()?)
        }
    };
    let pems = Pems { authority: authority.as_deref(), certificate: welcome.certificate.as_deref() };
    directory.keep_joined(joined, file, pems)
}

/// A certificate whose time is half over is renewed, step by step: whether there is another one now.
pub fn renew_if_due(directory: &Directory, file: &ClusterFile) -> Result<bool> {
    let due = directory.joined().filter(|joined| file.cert.is_some() && joined.renew_s < now_s());
    let Some(joined) = due else { return Ok(false) };
    let done = renew(file, &joined.host, &HostKey::of(&directory.etcd_key())?).map_err(|error| {
        let left_s = joined.expires_s.saturating_sub(now_s());
        Failure::new(format!(
            "this host's certificate, which ends in {}, can't be renewed: {error}",
            output::duration(left_s)
        ))
    })?;
    let Some((welcome, certificate)) = done.and_then(|welcome| Some((welcome.clone(), welcome.certificate?))) else {
        return Ok(false);
    };
    directory.keep_renewed(&Joined::of(joined.host, joined.address, &welcome), &certificate)?;
    Ok(true)
}

/// The address from which this host reaches etcd.
fn address_towards(etcd: &[String]) -> Result<IpAddr> {
    let target = etcd.iter().find_map(|url| {
        let (_, rest) = url.split_once("://")?;
        rest.trim_end_matches('/').parse::<std::net::SocketAddr>().ok()
    });
    let found = target.and_then(|target| {
        let any: IpAddr = if target.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        // No packet is sent.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(target).ok()?;
        socket.local_addr().ok().map(|address| address.ip()).filter(|address| !address.is_loopback())
    });
    found.ok_or_else(|| Failure::new("which address do other hosts reach this one by? Say it with --address"))
}
