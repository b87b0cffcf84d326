//! Running the real binary in a scratch folder, and holding its answers against the schemas.
#![allow(dead_code, missing_docs)]

pub mod chains;
pub mod mounted;
pub mod pki;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use vdkit_testkit::Killed;

/// A scratch folder in which commands run; gone at the end.
pub struct Scratch {
    dir: tempfile::TempDir,
}

/// What a command answered.
#[derive(Debug)]
pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    pub bytes: Vec<u8>,
}

impl Scratch {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// In a folder of a certain file system.
    pub fn new_in(parent: &str) -> Self {
        Self { dir: tempfile::tempdir_in(parent).unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn folder(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// A command of this binary in the folder, with nothing of the caller's terminal.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vdkit"));
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env_remove("NO_COLOR");
        command
    }

    /// Runs it, whatever comes of it.
    pub fn run(&self, arguments: &[&str]) -> Answer {
        answer(self.command(arguments).output().unwrap())
    }

    /// Runs it with these bytes on stdin.
    pub fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Answer {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A command that refuses early closes its end; its own answer says why.
        let _ = child.stdin.take().unwrap().write_all(input);
        answer(child.wait_with_output().unwrap())
    }

    /// Runs it and asks for success.
    pub fn ok(&self, arguments: &[&str]) -> Answer {
        let answer = self.run(arguments);
        assert_eq!(answer.code, Some(0), "vdkit {arguments:?}: {answer:?}");
        answer
    }

    /// Runs it and asks for this exit code, for one `error:` line that holds `words`, and for
    /// nothing on stdout.
    pub fn fails(&self, code: i32, words: &str, arguments: &[&str]) -> Answer {
        let answer = self.run(arguments);
        assert_eq!(answer.code, Some(code), "vdkit {arguments:?}: {answer:?}");
        let error = answer.stderr.lines().find(|line| line.starts_with("error: "));
        let error = error.unwrap_or_else(|| panic!("vdkit {arguments:?}: {answer:?}"));
        assert!(error.contains(words), "vdkit {arguments:?}: {error}");
        assert!(!answer.stderr.contains("panicked"), "vdkit {arguments:?}: {answer:?}");
        assert_eq!(answer.stdout, "", "vdkit {arguments:?}");
        answer
    }

    /// Runs it with `--json`, asks for this exit code, and holds the answer against the schema of
    /// the subcommand.
    pub fn json_of(&self, name: &str, code: i32, arguments: &[&str]) -> Value {
        // The answers of `vdkit lab list` are named lab-list.
        let mut all: Vec<&str> = match name.split_once('-') {
            Some((command, action)) => vec![command, action],
            None => vec![name],
        };
        all.push("--json");
        all.extend_from_slice(arguments);
        let answer = self.run(&all);
        assert_eq!(answer.code, Some(code), "vdkit {all:?}: {answer:?}");
        let value: Value = serde_json::from_str(&answer.stdout)
            .unwrap_or_else(|error| panic!("vdkit {all:?}: {error}: {answer:?}"));
        let faults = faults_against_schema(name, &value);
        assert!(faults.is_empty(), "vdkit {all:?}: {}\n{value:#}", faults.join("\n"));
        value
    }

    /// Starts `vdkit serve`, waits until clients can connect, and returns the line that says so.
    pub fn serve(&self, arguments: &[&str]) -> (Killed, String) {
        let (child, line) = started(&mut self.command(&[&["serve"], arguments].concat()));
        assert!(line.starts_with("serving"), "{arguments:?}: {line}");
        (child, line)
    }

    /// Both programs must find nothing wrong with an image.
    pub fn sound(&self, image: &str) {
        self.ok(&["check", image]);
        peer(&self.folder(), "qemu-img", &["check", "-q", image]);
    }

    /// The disks of two images must be the same to QEMU.
    pub fn same(&self, a: &str, b: &str) {
        peer(&self.folder(), "qemu-img", &["compare", "-q", a, b]);
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// The names of all that is in the folder, sorted: to see that nothing half-made stayed.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn answer(output: Output) -> Answer {
    Answer {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        bytes: output.stdout,
    }
}

/// Starts a command in the background, killed at the end, and returns its first line on stdout.
pub fn started(command: &mut Command) -> (Killed, String) {
    let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line)
}

/// The next line of a process in the background, without its end.
pub fn next_line(mut output: impl Read) -> String {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while output.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

/// qemu-io on an NBD export: all of its commands must succeed. Returns what it printed.
pub fn nbd_io(scratch: &Scratch, uri: &str, commands: &[&str]) -> String {
    let mut arguments = vec!["-f", "raw", uri];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    let said = peer(&scratch.folder(), "qemu-io", &arguments).stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(!said.contains("failed"), "{said}");
    said
}

/// Runs one of the peers (qemu-img, qemu-io), which the tests need.
pub fn peer(dir: &Path, program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; `make peers` installs it"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// What is wrong with an answer by `docs/schemas/NAME.json`. Knows as much of JSON Schema as those
/// files use, and refuses a schema that uses more.
pub fn faults_against_schema(name: &str, value: &Value) -> Vec<String> {
    let schema = schema_file(&format!("{name}.json"));
    let mut faults = Vec::new();
    hold(&schema, &schema, value, "$", &mut faults);
    faults
}

/// A file of `docs/schemas`.
fn schema_file(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

const WORDS: &[&str] = &[
    "$schema",
    "$defs",
    "$ref",
    "title",
    "description",
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "enum",
    "minimum",
    "oneOf",
];

fn hold(root: &Value, schema: &Value, value: &Value, at: &str, faults: &mut Vec<String>) {
    let rules = schema.as_object().unwrap_or_else(|| panic!("schema of {at} is no object"));
    for word in rules.keys() {
        assert!(WORDS.contains(&word.as_str()), "schema of {at} uses {word}");
    }
    if let Some(reference) = rules.get("$ref").and_then(Value::as_str) {
        let Some(name) = reference.strip_prefix("#/$defs/") else {
            let other = schema_file(reference);
            return hold(&other, &other, value, at, faults);
        };
        return hold(root, &root["$defs"][name], value, at, faults);
    }
    if let Some(choices) = rules.get("oneOf").and_then(Value::as_array) {
        let fits = choices.iter().filter(|choice| {
            let mut found = Vec::new();
            hold(root, choice, value, at, &mut found);
            found.is_empty()
        });
        if fits.count() != 1 {
            faults.push(format!("{at} does not fit exactly one of the choices"));
        }
        return;
    }
    if let Some(words) = rules.get("enum").and_then(Value::as_array)
        && !words.contains(value)
    {
        faults.push(format!("{at} is {value}, not one of {words:?}"));
    }
    let fits = match rules.get("type").and_then(Value::as_str) {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64() || value.is_i64(),
        Some("number") => value.is_number(),
        None => true,
        Some(other) => panic!("schema of {at} uses type {other}"),
    };
    if !fits {
        return faults.push(format!("{at} is {value}, not of type {}", rules["type"]));
    }
    if let (Some(least), Some(number)) = (rules.get("minimum"), value.as_f64())
        && number < least.as_f64().unwrap()
    {
        faults.push(format!("{at} is {value}, less than {least}"));
    }
    if let (Some(items), Some(values)) = (rules.get("items"), value.as_array()) {
        for (i, value) in values.iter().enumerate() {
            hold(root, items, value, &format!("{at}[{i}]"), faults);
        }
    }
    if let Some(object) = value.as_object() {
        hold_object(root, schema, object, at, faults);
    }
}

fn hold_object(
    root: &Value,
    schema: &Value,
    object: &serde_json::Map<String, Value>,
    at: &str,
    faults: &mut Vec<String>,
) {
    for key in schema["required"].as_array().into_iter().flatten() {
        if !object.contains_key(key.as_str().unwrap()) {
            faults.push(format!("{at} lacks {key}"));
        }
    }
    for (key, value) in object {
        let at = format!("{at}.{key}");
        match (schema["properties"].get(key), schema.get("additionalProperties")) {
            (Some(rule), _) => hold(root, rule, value, &at, faults),
            (None, Some(Value::Bool(false))) => faults.push(format!("{at} is not in the schema")),
            (None, Some(rule)) if rule.is_object() => hold(root, rule, value, &at, faults),
            (None, _) => panic!("schema of {at}: say additionalProperties"),
        }
    }
}

/// A qemu-io that holds an image open for writing until it is dropped.
pub struct Writer(std::process::Child);

impl Writer {
    pub fn start(dir: &Path, image: &str) -> Self {
        let mut child = Command::new("qemu-io")
            .args(["-f", if image.ends_with("qcow2") { "qcow2" } else { "raw" }, image])
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // An answer to a command says that the image is open, and so locked.
        child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
        let mut answer = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        while !answer.contains(|c: char| c.is_ascii_digit()) {
            let mut byte = [0];
            std::io::Read::read_exact(stdout, &mut byte).unwrap();
            answer.push(byte[0] as char);
        }
        Self(child)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // End of input ends it, and its locks.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A loop device over a file, until it is dropped.
pub struct Loop(pub String);

impl Loop {
    pub fn over(file: &Path, more: &[&str]) -> Self {
        let arguments = [&["--find", "--show"][..], more, &[file.to_str().unwrap()]].concat();
        let device = peer(Path::new("/"), "losetup", &arguments).stdout;
        Self(String::from_utf8(device).unwrap().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// Between two looks at another process, which needs a processor too.
const A_MOMENT: Duration = Duration::from_micros(200);

/// Waits until a process handles SIGINT, as `/proc` tells.
pub fn wait_until_signals_are_handled(pid: u32) {
    loop {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        // Bit 1 is SIGINT, bit 14 SIGTERM.
        if u64::from_str_radix(caught.trim(), 16).unwrap() & 0x4002 == 0x4002 {
            return;
        }
        std::thread::sleep(A_MOMENT);
    }
}

/// Sends a signal to a process that this test started.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

/// Waits until somebody listens at a Unix socket.
pub fn wait_until_connected(socket: &Path) {
    wait_until(|| UnixStream::connect(socket).is_ok());
}

/// Waits for something that another process is about to do.
pub fn wait_until(mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed().as_secs() < 300, "it does not happen");
        std::thread::sleep(A_MOMENT);
    }
}
