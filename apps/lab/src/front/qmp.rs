//! A minimal client of QEMU's machine protocol (QMP), for a running guest. Source: QEMU's "QEMU
//! Machine Protocol Specification" and its reference manual.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::error::{Context, Result, bail};
use serde_json::{Value, json};

/// Longest time to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest answer accepted.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Run state of a guest that QEMU stopped because of a disk error.
pub const STOPPED: &str = "io-error";

/// A connection to a running QEMU.
#[derive(Debug)]
pub struct Machine {
    stream: BufReader<UnixStream>,
}

impl Machine {
    /// Connects to QEMU's socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut this = Self { stream: BufReader::new(stream) };
        let greeting = this.line()?;
        if greeting.get("QMP").is_none() {
            bail!("{}: no greeting of QEMU: {greeting}", socket.display());
        }
        this.ask("qmp_capabilities")?;
        Ok(this)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = (&mut self.stream).take(ANSWER_BYTES_MAX).read_line(&mut line);
        if read.context("an answer of QEMU")? == 0 {
            bail!("QEMU has ended");
        }
        serde_json::from_str(&line).context("an answer of QEMU")
    }

    fn ask(&mut self, command: &str) -> Result<Value> {
        writeln!(self.stream.get_mut(), "{}", json!({ "execute": command }))?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU, asked for {command}: {error}");
            }
            // Events may come before the answer.
            if let Some(found) = answer.get_mut("return") {
                return Ok(found.take());
            }
        }
    }

    /// The guest's run state: `running`, [`STOPPED`] and others.
    pub fn status(&mut self) -> Result<String> {
        let found = self.ask("query-status")?;
        found["status"].as_str().map(str::to_owned).context("an answer of QEMU without a status")
    }

    /// Resumes a stopped guest.
    pub fn resume(&mut self) -> Result<()> {
        self.ask("cont").map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Sends one answer line after the other. Returns the requests.
    fn serve(listener: UnixListener, answers: &'static [&'static str]) -> Vec<String> {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        for (i, answer) in answers.iter().enumerate() {
            if i > 0 {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                asked.push(line.trim().to_owned());
            }
            writeln!(stream, "{answer}").unwrap();
        }
        asked
    }

    #[test]
    fn events_are_passed_over_and_errors_told() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = std::thread::spawn(|| {
            serve(
                listener,
                &[
                    r#"{"QMP": {"version": {}, "capabilities": []}}"#,
                    r#"{"return": {}}"#,
                    "{\"event\": \"STOP\"}\n{\"return\": {\"status\": \"io-error\"}}",
                    r#"{"error": {"class": "GenericError", "desc": "not now"}}"#,
                ],
            )
        });
        let mut machine = Machine::connect(&socket).unwrap();
        assert_eq!(machine.status().unwrap(), STOPPED);
        assert!(machine.resume().unwrap_err().to_string().contains("not now"));
        // The server has closed the connection.
        machine.status().unwrap_err();
        let asked = server.join().unwrap();
        assert_eq!(asked[1], r#"{"execute":"query-status"}"#);
        assert_eq!(asked[2], r#"{"execute":"cont"}"#);
    }
}
