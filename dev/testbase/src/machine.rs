//! A virtual machine of QEMU, driven by its monitor.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A machine that does not end by itself is ended after so many seconds.
const SECONDS_MAX: &str = "300";
/// How long a machine's firmware may take to come so far that it has filled in its data area.
const FIRMWARE_MAX: Duration = Duration::from_secs(120);
/// The data area that a PC's firmware keeps at this address of the memory.
const BIOS_DATA: &str = "xp /64xw 0x400";

/// A PC of 64 MiB without anything to boot from, and with one disk. Call
/// [`crate::require_peer`] for `qemu-system-x86_64` first.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Machine {
    /// Starts one with a qcow2 image as its disk; `more` are further arguments.
    ///
    /// # Panics
    /// If it does not start.
    #[track_caller]
    pub fn start(image: &Path, more: &[&str]) -> Self {
        let drive = format!("file={},format=qcow2,if=virtio,cache=writeback", image.display());
        let mut child = Command::new("timeout")
            .args(["--kill-after=5", SECONDS_MAX, "qemu-system-x86_64"])
            .args(["-machine", "pc,accel=tcg", "-m", "64", "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-qmp", "stdio", "-drive", &drive])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-system-x86_64");
        let to = child.stdin.take();
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut machine = Self { child, to, from };
        machine.answer("QMP");
        machine.execute(&json!({"execute": "qmp_capabilities"}));
        machine
    }

    /// Reads up to the message that has this key.
    #[track_caller]
    fn answer(&mut self, key: &str) -> Value {
        loop {
            let mut line = String::new();
            let read = self.from.read_line(&mut line).expect("the monitor's answer");
            assert_ne!(read, 0, "the machine has ended: {:?}", self.child.wait());
            let message: Value = serde_json::from_str(&line).expect("JSON");
            assert!(message.get("error").is_none(), "{message}");
            // Events come in between.
            if let Some(found) = message.get(key) {
                return found.clone();
            }
        }
    }

    #[track_caller]
    fn execute(&mut self, command: &Value) -> Value {
        let to = self.to.as_mut().expect("an open pipe");
        writeln!(to, "{command}").and_then(|()| to.flush()).expect("the monitor listens");
        self.answer("return")
    }

    /// What the human's monitor says to a command, such as `savevm name`: where it prints nothing,
    /// the command has worked.
    ///
    /// # Panics
    /// If the machine has ended.
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> String {
        let arguments = json!({"command-line": command});
        let said =
            self.execute(&json!({"execute": "human-monitor-command", "arguments": arguments}));
        said.as_str().unwrap_or_default().to_owned()
    }

    /// As [`Machine::ask`], for a command that says nothing where it works.
    ///
    /// # Panics
    /// If it says something.
    #[track_caller]
    pub fn tell(&mut self, command: &str) {
        let said = self.ask(command);
        assert_eq!(said, "", "{command}");
    }

    /// Lets the machine run until its firmware has filled in its data area, and stops it there.
    ///
    /// # Panics
    /// If that takes too long.
    #[track_caller]
    pub fn run_firmware(&mut self) {
        let started = Instant::now();
        // The word of its equipment is not 0 once it has looked.
        while self.ask("xp /1xh 0x410").trim().ends_with("0x0000") {
            assert!(started.elapsed() < FIRMWARE_MAX, "the firmware does nothing");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.tell("stop");
    }

    /// Registers of the processor, and what the firmware keeps in memory.
    #[track_caller]
    pub fn state(&mut self) -> String {
        let registers = self.ask("info registers");
        // How the emulator keeps the condition codes between two instructions is its own affair.
        let registers = registers.lines().filter(|line| !line.contains("CCO="));
        format!("{}\n{}", registers.collect::<Vec<_>>().join("\n"), self.ask(BIOS_DATA))
    }

    /// Ends it in an orderly way: its disk is closed then.
    ///
    /// # Panics
    /// If it fails.
    #[track_caller]
    pub fn quit(mut self) {
        self.execute(&json!({"execute": "quit"}));
        self.to = None;
        let status = self.child.wait().expect("the machine's end");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // After a panic; it has ended otherwise. `timeout` hands the signal on only when it is asked
        // kindly, and the machine ends when nobody is at its monitor any more.
        self.to = None;
        if matches!(self.child.try_wait(), Ok(None)) {
            let pid = rustix::process::Pid::from_child(&self.child);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = self.child.wait();
        }
    }
}
