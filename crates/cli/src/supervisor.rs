//! The host's side of a `freeflow run` container: gives it its vNIC, starts it, watches it, cleans up after it.

use crate::admin::Admin;
use crate::cluster::{Claimed, announce, check_drained, claim, meet};
use crate::container_names;
use crate::failure::{Context, EXIT_RUN_FAILED, Failure, Result, fail};
use crate::init::{self, GO, Program, Report};
use crate::names;
use crate::networks;
use crate::process::Process;
use crate::record::{OtherVnic, Record, Records, State, now_s};
use crate::sys::{self, Fork, Signals};
use crate::terminal;
use crate::view::{View, Volume};
use freeflow_client::VNIC_COUNT_MAX;
use freeflow_hostnet::run_dir::RunDir;
use freeflow_hostnet::{bridges, ports};
use freeflow_protocol::admin::VnicStatus;
use freeflow_shm::fd::{receive_message, send_message};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

/// How often a generated name may turn out to be taken.
const NAME_TRY_COUNT_MAX: usize = 64;

/// Checked arguments of `freeflow run`.
#[derive(Clone, Debug)]
pub struct Plan {
    pub name: Option<String>,
    /// Of new vNICs, in the order of their devices; at least one.
    pub networks: Vec<String>,
    /// Of the first one.
    pub ip: Option<IpAddr>,
    /// A declared vNIC, in the place of a new one.
    pub vnic: Option<String>,
    /// Wait for it until other hosts of the cluster let it go.
    pub waits: bool,
    pub labels: Vec<(String, String)>,
    pub detached: bool,
    pub remove: bool,
    pub volumes: Vec<Volume>,
    pub share_host: bool,
    /// The container has the names of its network.
    pub with_names: bool,
    pub program: Program,
    pub library: PathBuf,
}

/// Runs a container to its end; `started` is called with its name once the command runs. The exit code is the
/// command's.
pub fn supervise(run_dir: &RunDir, plan: &Plan, started: impl FnOnce(&str)) -> Result<i32> {
    let records = Records::of(run_dir);
    if let Some(name) = &plan.name {
        // No other host gives a vNIC away for nothing.
        records.check_free(name)?;
    }
    // Signals end the command as long as it waits for others.
    let (declared, claimed) =
        plan.vnic.as_deref().map(|name| declared_vnic(run_dir, name, plan.waits)).transpose()?.unzip();
    let claimed = claimed.flatten();
    let signals = Signals::supervisor().context("signals")?;
    let mut admin = Admin::connect(run_dir)?;
    let host = admin.status()?.host;
    records.reconcile(Some(&mut admin))?;
    if plan.networks.len() > VNIC_COUNT_MAX {
        fail!("a container can have {VNIC_COUNT_MAX} vNICs, and --network is given {} times", plan.networks.len());
    }
    let mut record = reserve(&records, plan, host)?;
    let running = start(run_dir, plan, declared, &mut admin, &records, &mut record);
    drop(claimed);
    match running {
        Ok(running) => {
            drop(admin);
            started(&record.name);
            let code = watch(&running, &signals);
            if let Err(failure) = finish(run_dir, &records, record, code) {
                // Reported, but the exit code that the caller waits for is the command's.
                crate::output::complaint(&failure);
            }
            Ok(code)
        }
        Err(failure) => {
            let _ = record.leave_vnics(&mut admin);
            for id in record.vnic_ids() {
                container_names::leave(run_dir, &mut admin, id, record.is_declared);
                ports::unplug(run_dir, id);
            }
            records.remove(&record.name, &record.id)?;
            Err(failure.or_code(EXIT_RUN_FAILED))
        }
    }
}

fn reserve(records: &Records, plan: &Plan, host: String) -> Result<Record> {
    let (network, others) = plan.networks.split_first().ok_or_else(|| Failure::new("no network is given"))?;
    let other = |network: &String| Ok(OtherVnic { id: names::id()?, network: network.clone(), ip: None, ip6: None });
    let mut record = Record {
        id: plan.vnic.clone().map_or_else(names::id, Ok)?,
        is_declared: plan.vnic.is_some(),
        name: String::new(),
        network: network.clone(),
        other_vnics: others.iter().map(other).collect::<Result<_>>()?,
        ip: None,
        ip6: None,
        host,
        state: State::Created,
        exit_code: None,
        note: None,
        supervisor: Process::current(),
        init: None,
        command_pid: None,
        command: plan.program.command.clone(),
        environment: plan.program.environment.iter().map(|(key, value)| format!("{key}={value}")).collect(),
        working_directory: plan.program.working_directory.clone(),
        detached: plan.detached,
        remove: plan.remove,
        created_s: now_s(),
        finished_s: None,
    };
    if let Some(name) = &plan.name {
        record.name = name.clone();
        records.reserve(&record)?;
        return Ok(record);
    }
    let mut last = Failure::new("none tried");
    for attempt in 0..NAME_TRY_COUNT_MAX {
        record.name = names::word_pair(attempt > 3)?;
        match records.reserve(&record) {
            Ok(()) => return Ok(record),
            Err(failure) => last = failure,
        }
    }
    let advice = "give one with --name, or remove old containers with freeflow rm";
    Err(Failure::new(format!("no free name was found ({last}); {advice}")))
}

/// A child that has been started, and its terminal's master end if it has one.
pub struct Running {
    pub pid: Pid,
    pub master: Option<OwnedFd>,
}

fn start(
    run_dir: &RunDir,
    plan: &Plan,
    declared: Option<VnicStatus>,
    admin: &mut Admin,
    records: &Records,
    record: &mut Record,
) -> Result<Running> {
    // Other hosts of the networks are met while the container is made.
    let meetings: Vec<_> = match &declared {
        Some(vnic) => vec![meet(run_dir, &vnic.network)],
        None => plan.networks.iter().map(|network| meet(run_dir, network)).collect(),
    };
    let vnics = match declared {
        Some(vnic) => {
            admin.occupy(&vnic.id, &record.name, true)?;
            vec![vnic]
        }
        None => attach_all(run_dir, plan, admin, record)?,
    };
    let mut bridges = Vec::new();
    for vnic in &vnics {
        bridges.push(bridges::ensure(run_dir, &admin.network(&vnic.network)?)?);
        container_names::add(run_dir, admin, vnic, &record.name);
    }
    let Some((first, others)) = vnics.split_first() else { fail!("the container has no vNIC") };
    record.network = first.network.clone();
    (record.ip, record.ip6) = (Some(first.address), first.address6);
    for (noted, vnic) in record.other_vnics.iter_mut().zip(others) {
        (noted.ip, noted.ip6) = (Some(vnic.address), vnic.address6);
    }
    let names = Some(container_names::file(run_dir, &first.network)).filter(|file| plan.with_names && file.exists());
    let view = View {
        names,
        hostname: record.name.clone(),
        vnic_directories: vnics.iter().map(|vnic| PathBuf::from(&vnic.directory)).collect(),
        library: plan.library.clone(),
        volumes: plan.volumes.clone(),
        hidden: run_dir.hidden(),
        share_host: plan.share_host,
        scratch: run_dir.containers(),
    };
    let mut program = plan.program.clone();
    program.environment.push(("HOSTNAME".into(), record.name.clone()));
    let (init, channel) = fork_init(&view, &program)?;
    let plug = |pid| {
        let plugged = vnics
            .iter()
            .zip(&bridges)
            .try_for_each(|(vnic, bridge)| networks::plug(run_dir, vnic, bridge, pid).map(drop));
        meetings.into_iter().for_each(|meeting| meeting.wait());
        plugged
    };
    match connect(plug, init, &channel, records, record) {
        Ok(master) => Ok(Running { pid: init, master }),
        Err(failure) => {
            // It ends by itself when it can't hear us; this is for one that hangs.
            drop(channel);
            let _ = rustix::process::kill_process(init, Signal::KILL);
            let _ = waitpid(Some(init), WaitOptions::empty());
            Err(failure)
        }
    }
}

fn attach_all(run_dir: &RunDir, plan: &Plan, admin: &mut Admin, record: &Record) -> Result<Vec<VnicStatus>> {
    let mut labels = vec![
        ("engine".to_string(), "freeflow".to_string()),
        ("supervisor".to_string(), record.supervisor.pid.to_string()),
    ];
    labels.extend(plan.labels.iter().cloned());
    let mut vnics = Vec::new();
    for (id, network) in record.vnic_ids().zip(&plan.networks) {
        check_drained(run_dir, network)?;
        // Names those there are, if there is no such network.
        admin.network(network)?;
        let ip = plan.ip.filter(|_| vnics.is_empty());
        let vnic = admin.attach(id, &record.name, network, ip, labels.clone());
        vnics.push(match ip {
            Some(ip) => vnic.context(format!("--ip {ip}"))?,
            None => vnic?,
        });
    }
    Ok(vnics)
}

/// A vNIC that was not made for a container; in a cluster it may come from another host, and stays here as long as the
/// claim is kept. Whether one of ours uses it is settled when the record is made.
pub fn declared_vnic(run_dir: &RunDir, name: &str, waits: bool) -> Result<(VnicStatus, Option<Claimed>)> {
    // The router may begin again while this waits.
    let there = || Ok::<_, Failure>(Admin::connect(run_dir)?.vnics()?.into_iter().find(|vnic| vnic.id == name));
    let announced = announce(run_dir, name);
    let (vnic, claimed) = match there()? {
        Some(vnic) => (Some(vnic), announced),
        None => {
            drop(announced);
            let claimed = claim(run_dir, name, waits)?;
            (if claimed.is_some() { there()? } else { None }, claimed)
        }
    };
    let vnic = vnic.ok_or_else(|| Failure::new(format!("no vNIC is called {name:?}; see: freeflow get vnics")))?;
    check_drained(run_dir, &vnic.network)?;
    if vnic.labels.iter().any(|(key, _)| key == "engine") {
        fail!("the vNIC {name} was made for the container {}, and goes with it", vnic.name);
    }
    Ok((vnic, claimed))
}

/// Forks PID 1 of a new PID namespace.
fn fork_init(view: &View, program: &Program) -> Result<(Pid, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).context("socketpair")?;
    let own_namespace = File::open("/proc/self/ns/pid").context("/proc/self/ns/pid")?;
    sys::unshare(UnshareFlags::NEWPID).context("can't make a PID namespace (root with CAP_SYS_ADMIN is needed)")?;
    let forked = sys::fork();
    if let Ok(Fork::Child) = forked {
        drop(ours);
        init::main(view, program, theirs)
    }
    // Later children (tc) belong to the host again.
    move_into_link_name_space(own_namespace.as_fd(), Some(LinkNameSpaceType::ProcessID)).context("setns")?;
    match forked.context("fork")? {
        Fork::Parent(init) => Ok((init, ours)),
        Fork::Child => unreachable!("the child never comes here"),
    }
}

/// Plugs in the vNIC when the namespaces are there, and lets the command start. Gives the terminal's master end.
fn connect(
    plug: impl FnOnce(u32) -> Result<()>,
    init: Pid,
    channel: &OwnedFd,
    records: &Records,
    record: &mut Record,
) -> Result<Option<OwnedFd>> {
    let init_pid = init.as_raw_nonzero().get() as u32;
    record.init = Process::of(init_pid);
    records.store(record)?;
    let mut fds = match next_report(channel)? {
        Some((Report::Ready, fds)) => fds,
        Some((Report::Failed { message, code }, _)) => return Err(Failure::new(message).with_code(code)),
        None => fail!("the container's init ended before it was ready"),
    };
    plug(init_pid)?;
    send_message(channel.as_fd(), GO, &[]).context("the container's init")?;
    match next_report(channel)? {
        Some((Report::Failed { message, code }, _)) => return Err(Failure::new(message).with_code(code)),
        Some((Report::Ready, _)) => fail!("the container's init got out of step"),
        None => {}
    }
    record.command_pid = first_child(init_pid).or(Some(init_pid));
    record.state = State::Running;
    records.store(record)?;
    Ok(fds.pop())
}

/// The next report; `None` when init has no more to say: the command runs.
fn next_report(channel: &OwnedFd) -> Result<Option<(Report, Vec<OwnedFd>)>> {
    let mut bytes = Vec::new();
    let (length, fds) = receive_message(channel.as_fd(), &mut bytes, 1).context("the container's init")?;
    if length == 0 {
        return Ok(None);
    }
    let report = serde_json::from_slice(&bytes[..length]).context("the container's init")?;
    Ok(Some((report, fds)))
}

/// The oldest child of a process, as this process numbers it.
fn first_child(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

/// Passes signals and the terminal on until the child ends; the shell's number for how it did.
pub fn watch(running: &Running, signals: &Signals) -> i32 {
    let _raw = running.master.as_ref().and_then(|master| {
        terminal::copy_size(master);
        terminal::Raw::enter().ok()
    });
    let stdin = std::io::stdin();
    let mut input_open = running.master.is_some();
    let mut output_open = running.master.is_some();
    loop {
        let mut fds = vec![PollFd::from_borrowed_fd(signals.fd(), PollFlags::IN)];
        if let Some(master) = &running.master {
            // A place for each, whether it is still open or not: an empty set of events alone would report a hang-up.
            fds.push(if input_open { PollFd::new(&stdin, PollFlags::IN) } else { fds[0].clone() });
            fds.push(if output_open { PollFd::new(master, PollFlags::IN) } else { fds[0].clone() });
        }
        let _ = poll(&mut fds, None);
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if let Some(master) = &running.master {
            if input_open && ready[1] {
                input_open = terminal::relay(&stdin, master);
            }
            if output_open && ready[2] {
                output_open = terminal::relay(master, std::io::stdout());
            }
        }
        while let Some(signal) = signals.next() {
            match (signal, &running.master) {
                (signal, _) if signal == Signal::CHILD.as_raw() => {}
                (signal, Some(master)) if signal == Signal::WINCH.as_raw() => terminal::copy_size(master),
                _ => {
                    let _ = sys::send_signal(running.pid, signal);
                }
            }
        }
        if let Ok(Some((_, status))) = waitpid(Some(running.pid), WaitOptions::NOHANG) {
            if let Some(master) = running.master.as_ref().filter(|_| output_open) {
                // Passes on the command's last output.
                while terminal::relay(master, std::io::stdout()) {}
            }
            return init::exit_code(status);
        }
    }
}

/// Frees what the container used. A router that is away is no obstacle: `freeflow up` settles the rest.
fn finish(run_dir: &RunDir, records: &Records, mut record: Record, code: i32) -> Result<()> {
    let mut admin = Admin::connect(run_dir).ok();
    if let Some(admin) = &mut admin {
        let _ = record.leave_vnics(admin);
    }
    for id in record.vnic_ids() {
        ports::unplug(run_dir, id);
        if let Some(admin) = &mut admin {
            container_names::leave(run_dir, admin, id, record.is_declared);
        }
    }
    if record.remove {
        return records.remove(&record.name, &record.id);
    }
    record.state = State::Exited;
    record.exit_code = Some(code);
    record.finished_s = Some(now_s());
    records.store(&record)
}
