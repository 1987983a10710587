//! `freeflow-guest`, the guest agent: serves `router.sock` in a virtual machine by the library's own protocol, and is
//! the near half of the host's router.
//!
//! It has one control channel to the router and one shared-memory device, in which all lies that libraries and router
//! share. When the channel ends, all connections end with it, as if the router had, and the agent begins again.
//!
//! The router is trusted here, as in a container; processes of the guest are not.
#![forbid(unsafe_code)]

mod agent;
mod channel;
mod device;
mod doctor;
mod libraries;
mod sysfs;

use agent::{Agent, Device};
use clap::{Parser, Subcommand};
use freeflow_protocol::guest::BootId;
use freeflow_shm::fd;
use rustix::fs::{FileType, Mode, OFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use sysfs::Tree;

/// Before the agent tries again to reach the router.
const PAUSE: Duration = Duration::from_millis(500);

/// FreeFlow's guest agent: gives the programs of a virtual machine the host's vNIC. Needs root.
#[derive(Parser)]
#[command(name = "freeflow-guest", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// The shared-memory device: a DAX device, or a file that the host's router has mapped, too [default: the machine's
    /// empty NVDIMM, of which the agent makes a DAX device]
    #[arg(long, value_name = "PATH")]
    device: Option<PathBuf>,
    /// Where the device's data begin in the host's file, bytes
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "device")]
    device_offset: u64,
    /// Size of the device's data, bytes [default: the file's]
    #[arg(long, value_name = "BYTES", requires = "device")]
    device_bytes: Option<u64>,
    /// The control channel: a virtio-serial port, or the router's Unix socket [default: the port io.freeflow.0]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Directory of router.sock, where libraries connect
    #[arg(long, value_name = "DIR", default_value = "/run/freeflow")]
    run_dir: PathBuf,
    /// For tests: the name of the boot, 32 hexadecimal digits [default: the kernel's]
    #[arg(long, value_name = "ID", hide = true, value_parser = parse_boot)]
    boot: Option<BootId>,
}

#[derive(Subcommand)]
enum Command {
    /// Say what of the way to the host's router is there, and what mends the rest
    Doctor,
    /// Make the shared-memory device of the machine's empty NVDIMM, if it is not there, and say where it is. Needs root
    Device,
}

/// Hyphens are passed over, as the kernel writes them.
fn parse_boot(text: &str) -> Result<BootId, String> {
    let wrong = || "write 32 hexadecimal digits".to_owned();
    let digits: String = text.trim().chars().filter(|digit| *digit != '-').collect();
    let number = u128::from_str_radix(&digits, 16).map_err(|_| wrong())?;
    if digits.len() == 32 { Ok(number.to_be_bytes()) } else { Err(wrong()) }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        Some(Command::Doctor) => return report(&arguments.run_dir),
        Some(Command::Device) => make_device(),
        None => run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("freeflow-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Fails if anything is missing.
fn report(run_dir: &Path) -> ExitCode {
    let checks = doctor::examine(&Tree::of_this_machine(), &run_dir.join("router.sock").to_string_lossy());
    print!("{}", doctor::report(&checks));
    ExitCode::from(u8::from(checks.iter().any(|check| check.found.is_err())))
}

fn make_device() -> io::Result<()> {
    let device::DaxDevice { node, offset, bytes } = device::prepare(&Tree::of_this_machine())?;
    println!("{} offset {offset} bytes {bytes}", node.display());
    Ok(())
}

fn run(arguments: &Arguments) -> io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(io::Error::other("needs root: it reads other processes' memory; try sudo"));
    }
    let boot = match arguments.boot {
        Some(boot) => boot,
        None => parse_boot(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?).map_err(io::Error::other)?,
    };
    let device = open_device(arguments)?;
    std::fs::create_dir_all(&arguments.run_dir)?;
    let mut last = String::new();
    loop {
        let why = match connect(arguments.control.as_deref()) {
            Ok(stream) => match Agent::serve(&device, stream, boot, &arguments.run_dir) {
                Ok(why) => why.to_owned(),
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        // Once of each reason in a row: the router may be away for long.
        if why != last {
            eprintln!("freeflow-guest: {why}; trying again");
            last = why;
        }
        std::thread::sleep(PAUSE);
    }
}

fn open_device(arguments: &Arguments) -> io::Result<Device> {
    let (path, offset, bytes) = match &arguments.device {
        Some(path) => (path.clone(), arguments.device_offset, arguments.device_bytes),
        None => {
            let device::DaxDevice { node, offset, bytes } = device::prepare(&Tree::of_this_machine())?;
            (node, offset, Some(bytes))
        }
    };
    let explain = |error: io::Error| io::Error::other(format!("{}: {error}", path.display()));
    let memory = std::fs::File::options().read(true).write(true).open(&path).map_err(explain)?;
    let bytes = match bytes {
        Some(bytes) => bytes,
        None => memory.metadata().map_err(explain)?.len().saturating_sub(offset),
    };
    Ok(Device { memory: memory.into(), offset, bytes })
}

/// The control channel, which does not block.
fn connect(named: Option<&Path>) -> io::Result<OwnedFd> {
    let found = match named {
        Some(path) => Some(path.to_owned()),
        None => channel::find(&Tree::of_this_machine()),
    };
    let path = found.ok_or_else(|| io::Error::other("no port io.freeflow.0; see freeflow-guest doctor"))?;
    let explain = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let about = rustix::fs::stat(&path).map_err(|error| explain(error.into()))?;
    if FileType::from_raw_mode(about.st_mode) == FileType::Socket {
        let stream = fd::connect_stream(&path).map_err(explain)?;
        fd::set_nonblocking(&stream, true)?;
        return Ok(stream);
    }
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| explain(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_named_as_the_kernel_names_it() {
        let boot = parse_boot("0102030405060708-090a0b0c-0d0e0f10\n").unwrap();
        assert_eq!(boot, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        for wrong in ["", "01", "g0000000000000000000000000000000", "000000000000000000000000000000000", "+1"] {
            assert!(parse_boot(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_command_line_is_as_it_should_be() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
