//! The process that follows the cluster for a host: `freeflow cluster follow`, begun by `freeflow up`, ended by `down`.
use crate::failure::{Context, Result, fail};
use crate::process::Process;
use crate::router::ENVIRONMENT;
use crate::sys::{self, Fork};
use crate::tools;
use freeflow_hostnet::run_dir::{RunDir, write_atomically};
use rustix::process::Signal;
use serde_json::json;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const END_TIMEOUT: Duration = Duration::from_secs(5);

pub fn log_file(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("cluster.log")
}

/// Of each file of the log, and how many there are, as the router's.
const LOG_BYTES_MAX: u64 = 8 << 20;
const LOG_COUNT: usize = 4;

/// Has what this process says go to a new file, once the log is full; those of former times are beside it,
/// `cluster.log.1` is the latest.
pub fn rotate_log(run_dir: &RunDir) {
    let path = log_file(run_dir);
    let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let (Ok(ours), Ok(named)) = (rustix::fs::fstat(std::io::stdout()), rustix::fs::stat(&path)) else { return };
    if identity(ours) != identity(named) || u64::try_from(named.st_size).unwrap_or_default() < LOG_BYTES_MAX {
        return;
    }
    // If it can't be, the old file goes on.
    let _ = rotate(&path).and_then(|file| {
        rustix::stdio::dup2_stdout(&file)?;
        Ok(rustix::stdio::dup2_stderr(&file)?)
    });
}

/// The new file.
fn rotate(path: &Path) -> io::Result<File> {
    let numbered = |number: usize| match number {
        0 => path.to_owned(),
        _ => PathBuf::from(format!("{}.{number}", path.display())),
    };
    for number in (0..LOG_COUNT - 1).rev() {
        match fs::rename(numbered(number), numbered(number + 1)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    File::options().create(true).append(true).mode(0o600).open(path)
}

fn record_file(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("cluster.pid")
}

fn problems_file(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("cluster.problems")
}

/// Notes what can't be done just now, for whoever asks this host.
pub fn note_problems(run_dir: &RunDir, problems: &[String]) {
    let text = serde_json::to_vec(problems).expect("texts are encodable");
    // It is in the log, too.
    let _ = write_atomically(&problems_file(run_dir), &text, 0o600);
}

fn state_file(run_dir: &RunDir) -> PathBuf {
    run_dir.path().join("cluster.state")
}

/// Tells the router, for its metrics and its health, when etcd last answered, and how much can't be followed.
pub fn note_state(run_dir: &RunDir, heard_ns: u64, problem_count: usize) {
    let text = json!({"heard_ns": heard_ns, "problem_count": problem_count}).to_string();
    // Without it the host counts as behind.
    let _ = write_atomically(&state_file(run_dir), text.as_bytes(), 0o600);
}

/// The process lives and has these problems. `None`: it does not live.
pub fn problems(run_dir: &RunDir) -> Option<Vec<String>> {
    recorded(run_dir)?;
    let text = fs::read(problems_file(run_dir)).unwrap_or_default();
    Some(serde_json::from_slice(&text).unwrap_or_default())
}

fn recorded(run_dir: &RunDir) -> Option<Process> {
    let process: Process = serde_json::from_slice(&fs::read(record_file(run_dir)).ok()?).ok()?;
    process.is_alive().then_some(process)
}

/// The process itself says who it is.
pub fn record(run_dir: &RunDir) -> Result<()> {
    let text = serde_json::to_vec(&Process::current()).expect("a process is encodable");
    write_atomically(&record_file(run_dir), &text, 0o600).context(record_file(run_dir).display())
}

/// Starts it in a session of its own, if there is none.
pub fn start(run_dir: &RunDir) -> Result<()> {
    if recorded(run_dir).is_some() {
        return Ok(());
    }
    let (program, path) = (tools::own_path()?, log_file(run_dir));
    let log = File::options().create(true).append(true).mode(0o600).open(&path).context(path.display())?;
    let child = match sys::fork().context("fork")? {
        Fork::Parent(child) => child,
        Fork::Child => {
            let _ = rustix::process::setsid();
            let _ = sys::close_on_exec_from(3);
            sys::reset_signals();
            let mut command = Command::new(program);
            command.arg("--run-dir").arg(run_dir.path()).args(["cluster", "follow"]);
            command.env_clear().envs(ENVIRONMENT.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
            command.current_dir("/").stdin(Stdio::null()).stderr(Stdio::from(log));
            if let Ok(output) = File::options().append(true).open(&path) {
                command.stdout(output);
            }
            let error = command.exec();
            eprintln!("freeflow cluster follow: {error}");
            sys::exit_now(1)
        }
    };
    // It is recorded before anybody looks for it.
    let process = Process::of(u32::try_from(child.as_raw_nonzero().get()).unwrap_or_default());
    let Some(process) = process else { fail!("the follower of the cluster did not start; see {}", path.display()) };
    let text = serde_json::to_vec(&process).expect("a process is encodable");
    write_atomically(&record_file(run_dir), &text, 0o600).context(record_file(run_dir).display())
}

/// Ends it, if there is one.
pub fn end(run_dir: &RunDir) -> Result<()> {
    if let Some(process) = recorded(run_dir) {
        process.signal(Signal::TERM).context("the follower of the cluster")?;
        if !process.wait_end(END_TIMEOUT) {
            process.signal(Signal::KILL).context("the follower of the cluster")?;
            process.wait_end(END_TIMEOUT);
        }
    }
    let _ = fs::remove_file(record_file(run_dir));
    let _ = fs::remove_file(problems_file(run_dir));
    let _ = fs::remove_file(state_file(run_dir));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_bounded_number_of_files_is_kept() {
        let directory = std::env::temp_dir().join(format!("freeflow-cluster-log.{}", std::process::id()));
        fs::create_dir(&directory).expect("a directory");
        let path = directory.join("cluster.log");
        for number in 0..2 * LOG_COUNT {
            rotate(&path).expect("a new file").write_all(number.to_string().as_bytes()).expect("written");
        }
        let text = |name: &str| fs::read_to_string(directory.join(name)).expect("read");
        assert_eq!(fs::read_dir(&directory).expect("read").count(), LOG_COUNT);
        assert_eq!(["cluster.log", "cluster.log.1", "cluster.log.3"].map(text), ["7", "6", "4"]);
        fs::remove_dir_all(&directory).expect("removed");
    }
}
