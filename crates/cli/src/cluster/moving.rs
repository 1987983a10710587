//! `freeflow move`: a declared vNIC goes to another host, with its address.
use super::file;
use crate::arguments_control::MoveVnic;
use crate::failure::{Result, fail};
use crate::output;
use freeflow_cluster::{ClusterFile, Move, Operator, View};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_orchestrator::objects::ObjectKind;
use std::thread;
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_millis(200);

/// Moves it, and waits until the host has it.
pub fn move_vnic(run_dir: &RunDir, arguments: &MoveVnic) -> Result<()> {
    let MoveVnic { vnic, to, force, seconds, of } = arguments;
    let file = file(run_dir, of)?;
    let moved = Operator::open(&file)?.move_vnic(vnic, to, *force)?;
    let until = Instant::now() + Duration::from_secs(*seconds);
    loop {
        let view = view_of(&file)?;
        if let Some(why) = refused_by(&view, vnic, to) {
            fail!("the vNIC {vnic} is {to}'s, and {to} can't make it: {why}");
        }
        if is_there(&view, vnic, to) {
            return report(vnic, to, &moved, *force);
        }
        if Instant::now() >= until {
            return Err(late(&view, vnic, to, &moved, *seconds));
        }
        thread::sleep(LOOK);
    }
}

fn view_of(file: &ClusterFile) -> Result<View> {
    Ok(Operator::open(file)?.view()?)
}

fn report(vnic: &str, to: &str, moved: &Move, force: bool) -> Result<()> {
    match &moved.from {
        Some(from) if from != to && force => {
            output::line(format!("The vNIC {vnic} is on {to}. It was taken from {from}."));
            output::line(format!(
                "{from} may not know yet, and its container goes on: the other hosts drop its packets from that address, \
                 and hosts that are cut off with it do not."
            ));
        }
        Some(from) if from != to => output::line(format!("The vNIC {vnic} is on {to}; it was on {from}.")),
        _ => output::line(format!("The vNIC {vnic} is on {to}.")),
    }
    Ok(())
}

fn late(view: &View, vnic: &str, to: &str, moved: &Move, seconds: u64) -> crate::failure::Failure {
    let place = view.places().get(vnic).map(|(_, place)| place);
    let text = match (place, &moved.from) {
        (Some(place), Some(from)) if place.host == *from && from != to => format!(
            "the host {from} has not let the vNIC {vnic} go within {seconds} s; it does when it hears of it. If it is down: \
             freeflow move {vnic} --to {to} --force, after which its packets are believed no more. To leave the vNIC there: \
             freeflow move {vnic} --to {from}"
        ),
        _ => format!("the host {to} has not made the vNIC {vnic} within {seconds} s; see freeflow cluster status"),
    };
    crate::failure::Failure::new(text)
}

fn is_there(view: &View, vnic: &str, host: &str) -> bool {
    let Some((at, place)) = view.places().get(vnic) else { return false };
    let is_placed = place.host == host && place.next.is_none();
    is_placed && view.followed().get(host).is_some_and(|followed| followed.revision >= at.0)
}

fn refused_by(view: &View, vnic: &str, host: &str) -> Option<String> {
    let followed = view.followed().get(host).filter(|_| is_there(view, vnic, host))?;
    let is_it = |problem: &&freeflow_cluster::Problem| {
        problem.kind.as_deref() == Some(ObjectKind::Vnic.name()) && problem.name.as_deref() == Some(vnic)
    };
    followed.problems.iter().find(is_it).map(|problem| problem.message.clone())
}
