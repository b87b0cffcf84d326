//! Runs a program with slow syncs: `cargo run -p vdkit-supervisor --example slow-syncs -- 3000
//! vdkit serve …` (microseconds).

use std::process::{Command, ExitCode};
use std::time::Duration;

use vdkit_supervisor::SlowSyncs;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let micros = arguments.next().and_then(|text| text.to_str()?.parse().ok());
    let (Some(micros), Some(program)) = (micros, arguments.next()) else {
        eprintln!("usage: slow-syncs MICROSECONDS PROGRAM [ARGUMENT]…");
        return ExitCode::from(2);
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let run = SlowSyncs::new(Duration::from_micros(micros)).and_then(|slow| {
        eprintln!("slow-syncs: a sync takes {:?}", slow.measure()?);
        slow.spawn(command)
    });
    match run.and_then(|mut run| Ok((run.child.wait()?, run.syncs()))) {
        Ok((status, syncs)) => {
            eprintln!("slow-syncs: {syncs} syncs, {status}");
            ExitCode::from(status.code().and_then(|code| code.try_into().ok()).unwrap_or(1))
        }
        Err(error) => {
            eprintln!("slow-syncs: {error}");
            ExitCode::from(1)
        }
    }
}
