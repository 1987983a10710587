//! The controller: it admits hosts, one after another, and gives blocks. What it decides is decided by the real
//! functions; its calls of etcd are taken by their number, and by the bytes that they read.
use crate::follower::timed;
use crate::words;
use crate::world::{Event, SECOND, World};
use freeflow_cluster::{WRITE_COUNT_MAX, due_default};
use freeflow_orchestrator::{DEFAULT_NETWORK, Pool};

/// A controller looks for requests so often, and answers so many then.
const ADMISSION: u64 = 200 * SECOND / 1000;
const ANSWER_COUNT: usize = 32;
/// Requests that it knows of; more wait in etcd, until it lists all again.
const PENDING_COUNT_MAX: usize = 256;
/// Calls of etcd's, one after another, by which a host is admitted, beside those that write keys: the token twice,
/// and whether the host is known; twice all blocks.
const ADMISSION_READS: u64 = 3;
const ADMISSION_LISTS: u64 = 2;
/// A user and its role, a role's rights, and two leases.
const ADMISSION_CALLS: u64 = 3 + 8 + 2;

impl World {
    /// As it was brought up with, or as a controller has given it.
    pub fn record(&self, number: usize) -> freeflow_cluster::HostRecord {
        let record = words::record(number);
        let block = self.control.blocks.get(&(DEFAULT_NETWORK.to_owned(), words::host_name(number)));
        match block {
            Some(block) => freeflow_cluster::HostRecord { default_range: block.to_string(), ..record },
            None => record,
        }
    }

    fn blocks_bytes(&self) -> u64 {
        self.control.blocks.len() as u64 * words::BLOCK_BYTES
    }

    pub fn asks(&mut self, host: usize) {
        let (done, _) = self.commit(words::join_request(host), false);
        let control = &mut self.control;
        if control.pending.len() < PENDING_COUNT_MAX { &mut control.pending } else { &mut control.passed_over }
            .push_back(host);
        self.admit_at(done);
    }

    fn admit_at(&mut self, at: u64) {
        if !self.control.is_planned {
            self.control.is_planned = true;
            let at = at.max(self.control.batch_began + ADMISSION);
            self.plan(at.saturating_sub(self.now), Event::Admit);
        }
    }

    /// One host, which follows once it has its answer.
    pub fn admit(&mut self) {
        self.control.is_planned = false;
        if self.control.batch_left == 0 {
            (self.control.batch_left, self.control.batch_began) = (ANSWER_COUNT, self.now);
        }
        let Some(host) = self.control.pending.pop_front() else { return self.end_batch() };
        let took = self.admit_host(host);
        self.control.batch_left -= 1;
        if self.control.batch_left > 0 && !self.control.pending.is_empty() {
            self.control.is_planned = true;
            return self.plan(took, Event::Admit);
        }
        self.end_batch_after(took);
    }

    fn end_batch(&mut self) {
        self.end_batch_after(0);
    }

    fn end_batch_after(&mut self, mut took: u64) {
        self.control.batch_left = 0;
        if self.control.pending.is_empty() && !self.control.passed_over.is_empty() {
            // All is listed again, to find those that it has not taken in.
            let count = self.control.passed_over.len().min(PENDING_COUNT_MAX);
            let some: Vec<usize> = self.control.passed_over.drain(..count).collect();
            self.control.pending.extend(some);
            let sent_at = self.etcd.send_list(self.now + took, true);
            let listed_ns = self.list_anew(0);
            took = sent_at - self.now + self.setting.pace.of(listed_ns);
        }
        self.busy_for(0, took);
        if !self.control.pending.is_empty() {
            self.admit_at(self.now + took + 1);
        }
    }

    /// How long that takes.
    fn admit_host(&mut self, host: usize) -> u64 {
        let model = self.setting.etcd;
        let name = words::host_name(host);
        let view = &self.sampled[&0].follower.view;
        let pool = words::DEFAULT_CIDR.parse().expect("a range");
        let (due, decide_ns) = timed(|| due_default(view, pool, &name, &self.control.blocks));
        let decide_ns = self.setting.pace.of(decide_ns);
        self.control.admit_ns = self.control.admit_ns.max(decide_ns);
        let reads = ADMISSION_READS * model.read_ns(0) + ADMISSION_LISTS * model.read_ns(self.blocks_bytes());
        self.etcd.hold_up(self.now, ADMISSION_CALLS);
        let by_token = self.control.admitted.entry(words::token_number(host)).or_default();
        *by_token += 1;
        let [noted, answer] = words::join_answer(host, *by_token);
        let (done, _) = self.commit(noted, false);
        let call_ns = (done - self.now).max(model.commit_ns);
        let took = 2 * decide_ns + reads + (ADMISSION_CALLS + 3) * call_ns;
        match due {
            Ok(block) => {
                self.control.written += 1;
                let write = (format!("{DEFAULT_NETWORK}/{name}"), Some(block.to_string()));
                let (_, at) = self.commit(words::blocks([write].into_iter(), self.control.written), true);
                self.control.given_at = at;
                self.control.blocks.insert((DEFAULT_NETWORK.to_owned(), name), block);
                self.plan(took, Event::Answered(host));
            }
            Err(_) => {
                self.control.refused += 1;
                self.control.joining -= 1;
            }
        }
        self.commit(answer, false);
        took
    }

    /// Blocks that are due by what the controller has heard of.
    pub fn look_for_blocks(&mut self) {
        // Its last blocks have to come as news first.
        if self.control.is_giving || self.sampled[&0].taken < self.control.given_at {
            return;
        }
        let (due, took_ns) = self.controller().control();
        self.control.look_ns = self.control.look_ns.max(took_ns);
        if due.writes.is_empty() {
            let all = self.controller().view.hosts().len() * self.networks.count;
            self.control.without_block = if due.full.is_empty() { 0 } else { all - self.control.given };
            return;
        }
        let some = due.writes.into_iter().take(WRITE_COUNT_MAX);
        self.control.to_give = some.map(|(at, block)| (at, block.map(|block| block.to_string()))).collect();
        self.control.is_giving = true;
        // It reads the blocks and what is declared before it decides once more, and then has a lease, and writes.
        let model = self.setting.etcd;
        let reads = model.read_ns(self.blocks_bytes()) + model.read_ns(0);
        let took = 2 * self.setting.pace.of(took_ns) + reads + model.commit_ns;
        self.busy_for(0, took + model.commit_ns);
        self.plan(took, Event::Blocks);
    }

    pub fn give_due(&mut self) {
        let writes = std::mem::take(&mut self.control.to_give);
        self.give(&writes);
        self.control.is_giving = false;
    }

    pub fn give(&mut self, writes: &[(String, Option<String>)]) {
        self.control.written += 1;
        let (_, revision) = self.commit(words::blocks(writes.iter().cloned(), self.control.written), true);
        self.control.given_at = revision;
        for (at, block) in writes {
            let Some((network, host)) = at.split_once('/') else { continue };
            let block: Option<Pool> = block.as_ref().and_then(|block| block.parse().ok());
            let (number, of) = (words::network_number(network), words::host_number(host));
            if let (Some(number), Some(of), Some(block)) = (number, of, block) {
                self.hosts[of].blocks.insert(number, (revision, block));
                self.control.blocks.insert((network.to_owned(), host.to_owned()), block);
                self.control.given += 1;
            }
        }
    }
}
