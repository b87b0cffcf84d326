//! One case by both programs, each in a copy of the images' folder.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::around::{Holder, as_stranger, is_root, mount_small, stranger_runs, unmount};
use crate::cases::{Around, Case};

/// Seconds that a command may take; the slowest takes two.
const LIMIT_SECONDS: u32 = 60;

/// Images that others stand beneath, or that have other files.
const STANDING: [&str; 7] =
    ["top.qcow2", "mid.qcow2", "onraw.qcow2", "ext.qcow2", "flat.vmdk", "one.vmdk", "two.vmdk"];

/// The passwords of the cases' images.
const PASSWORDS: [&str; 2] = ["abc", "def"];

/// The exit code of `timeout` for a program that it ended.
const HUNG: i32 = 124;

/// What differs between the programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which of the case's commands, from 0.
    pub step: usize,
    /// What was compared.
    pub what: What,
    /// The reference's.
    pub theirs: String,
    /// The candidate's.
    pub ours: String,
    /// The reference failed at this step, or for files and images at any.
    pub failed: bool,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The exit code.
    Code,
    /// Everything on stdout.
    Stdout,
    /// The kind of the first message on stderr, where programs match it.
    Stderr,
    /// The names of files in the folder afterwards.
    Files,
    /// What the reference says of a resulting image: format, size, backing, content.
    Image,
}

impl Difference {
    /// A short text that is equal for differences with one cause.
    pub fn kind(&self) -> String {
        let first = self
            .theirs
            .lines()
            .zip(self.ours.lines().chain(std::iter::repeat("")))
            .find(|(theirs, ours)| theirs != ours)
            .map_or("", |(theirs, _)| theirs);
        let letters: String = first.chars().filter(|c| !c.is_ascii_digit()).take(60).collect();
        format!("{:?}: {letters}", self.what)
    }

    /// Both sides.
    pub fn text(&self) -> String {
        format!(
            "  step {} {:?}\n  theirs: {}\n  ours:   {}",
            self.step,
            self.what,
            self.theirs.trim_end().replace('\n', "\n          "),
            self.ours.trim_end().replace('\n', "\n          ")
        )
    }
}

/// The two programs, and the folder of images.
#[derive(Debug)]
pub struct Twins<'a> {
    programs: [&'a Path; 2],
    template: &'a Path,
    scratch: tempfile::TempDir,
    limit_seconds: u32,
}

impl<'a> Twins<'a> {
    /// Twins with a scratch folder of their own.
    ///
    /// # Panics
    /// The folder cannot be made.
    pub fn new(reference: &'a Path, candidate: &'a Path, template: &'a Path) -> Self {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        // A stranger must reach what is in it.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(scratch.path(), mode).expect("a scratch folder");
        let programs = [reference, candidate];
        Self { programs, template, scratch, limit_seconds: LIMIT_SECONDS }
    }

    /// Twins whose commands may take so many seconds.
    pub fn with_limit(self, limit_seconds: u32) -> Self {
        Self { limit_seconds, ..self }
    }

    /// Runs one case, and returns what differs.
    ///
    /// # Panics
    /// A program cannot be started.
    pub fn run(&self, case: &Case) -> Vec<Difference> {
        if matches!(case.around, Around::Stranger | Around::Small) && !is_root() {
            return Vec::new();
        }
        if case.around == Around::Stranger && !self.programs.iter().all(|one| stranger_runs(one)) {
            return Vec::new();
        }
        let folders = ["reference", "candidate"].map(|name| self.fresh(name, case));
        let holders = folders.each_ref().map(|f| Holder::of(self.programs[0], f, case.around));
        let found = self.run_in(case, &folders);
        drop(holders);
        if case.around == Around::Small {
            folders.iter().for_each(|folder| unmount(folder));
        }
        found
    }

    fn run_in(&self, case: &Case, folders: &[PathBuf; 2]) -> Vec<Difference> {
        let mut found = Vec::new();
        let mut any_failed = false;
        for (step, command) in case.commands.iter().enumerate() {
            let [theirs, ours] = [0, 1].map(|which| {
                let (program, folder) = (self.programs[which], &folders[which]);
                match case.around {
                    Around::Stranger => self.run_as(as_stranger(), program, folder, command),
                    _ => self.answer(program, folder, command),
                }
            });
            let failed = !theirs.status.success();
            any_failed |= failed;
            let mut note = |what, theirs: String, ours: String| {
                if theirs != ours {
                    found.push(Difference { step, what, theirs, ours, failed });
                }
            };
            let names = self.programs.map(|program| program.display().to_string());
            note(What::Code, code(&theirs), code(&ours));
            note(What::Stdout, stdout(&theirs, command), stdout(&ours, command));
            note(What::Stderr, stderr(&theirs, &names[0]), stderr(&ours, &names[1]));
        }
        let step = case.commands.len() - 1;
        let [theirs, ours] = folders.each_ref().map(|folder| names(folder));
        // Files that only one program left are reported once; the others are compared in any case.
        let both: BTreeSet<String> = theirs.intersection(&ours).cloned().collect();
        if theirs != ours {
            let text = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(" ");
            let (theirs, ours) = (text(theirs), text(ours));
            let (what, failed) = (What::Files, any_failed);
            found.push(Difference { step, what, theirs, ours, failed });
        }
        for name in different(&both, folders) {
            let [theirs, ours] = folders.each_ref().map(|folder| self.image(folder, &name));
            let same = self.same_content(folders, &name, &theirs);
            if theirs != ours || !same {
                let ours = if same { ours } else { format!("{ours}other content") };
                let (what, failed) = (What::Image, any_failed);
                found.push(Difference { step, what, theirs, ours, failed });
            }
        }
        found
    }

    /// A folder with the images that the case names.
    fn fresh(&self, name: &str, case: &Case) -> PathBuf {
        let folder = self.scratch.path().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).expect("a scratch folder");
        if case.around == Around::Small {
            mount_small(&folder);
        }
        let words: Vec<&str> = case.commands.iter().flatten().map(String::as_str).collect();
        for entry in std::fs::read_dir(self.template).expect("the images") {
            let entry = entry.expect("the images");
            let file = entry.file_name().to_string_lossy().into_owned();
            let stem = file.split('.').next().unwrap_or(&file).to_owned();
            // An image brings what stands beneath it along.
            let beneath = |other: &str, file: &str| match other {
                "top.qcow2" => file == "mid.qcow2" || file == "a.qcow2",
                "mid.qcow2" => file == "a.qcow2",
                "onraw.qcow2" => file == "full.raw",
                "ext.qcow2" => file == "ext.data",
                "flat.vmdk" => stem.starts_with("flat"),
                "one.vmdk" => stem.starts_with("one"),
                "two.vmdk" => stem.starts_with("two"),
                _ => false,
            };
            let named = words.iter().any(|word| {
                word.contains(&file)
                    || STANDING.iter().any(|other| word.contains(other) && beneath(other, &file))
            });
            if named {
                std::fs::copy(entry.path(), folder.join(&file)).expect("a copy");
            }
        }
        folder
    }

    /// What the reference says of an image: the lines that do not depend on how it is laid out.
    fn image(&self, folder: &Path, name: &str) -> String {
        let done = self.answer(self.programs[0], folder, &["info", "-U", name]);
        let told = [
            "file format:",
            "virtual size:",
            "cluster_size:",
            "backing file",
            "    compat:",
            "    compression",
            "    lazy",
            "    refcount bits",
            "    extended",
            "    data file",
            "encrypted:",
            "    create type",
        ];
        let mut text: String = String::from_utf8_lossy(&done.stdout)
            .lines()
            .filter(|line| told.iter().any(|start| line.starts_with(start)))
            .map(|line| format!("{line}\n"))
            .collect();
        if text.contains("format: qcow2")
            || text.contains("format: vdi")
            || text.contains("format: vmdk")
        {
            let done = self.answer(self.programs[0], folder, &["check", "-U", name]);
            text += &format!("check: {}\n", code(&done));
        }
        text
    }

    /// Whether two images hold the same. `described` is what [`Twins::image`] says of the reference's.
    fn same_content(&self, folders: &[PathBuf; 2], name: &str, described: &str) -> bool {
        let paths = folders.each_ref().map(|folder| folder.join(name).display().to_string());
        if described.contains("encrypted: yes") {
            return self.same_plaintext(&folders[0], &paths, described);
        }
        let command = ["compare", "-U", paths[0].as_str(), paths[1].as_str()];
        let done = self.answer(self.programs[0], &folders[0], &command);
        match done.status.code() {
            Some(0) => true,
            // A file that is no image of its own, such as an extent.
            Some(1) => false,
            _ => std::fs::read(&paths[0]).ok() == std::fs::read(&paths[1]).ok(),
        }
    }

    /// The answer of a program; its exit code is [`HUNG`] if it does not end.
    fn answer(&self, program: &Path, folder: &Path, arguments: &[impl AsRef<OsStr>]) -> Output {
        self.run_as(&[], program, folder, arguments)
    }

    /// As [`Twins::answer`], with words before the program's name.
    fn run_as(
        &self,
        before: &[&str],
        program: &Path,
        folder: &Path,
        arguments: &[impl AsRef<OsStr>],
    ) -> Output {
        Command::new("timeout")
            .args(["--kill-after=5", &self.limit_seconds.to_string()])
            .args(before)
            .arg(program)
            .args(arguments)
            .current_dir(folder)
            .env("LC_ALL", "C")
            .env("TZ", "UTC")
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()))
    }

    /// Compares two encrypted images, with each of the passwords that cases use. Images that none of
    /// them opens are equal if it opens neither.
    fn same_plaintext(&self, folder: &Path, paths: &[String; 2], told: &str) -> bool {
        let (driver, key) = match told.contains("file format: luks") {
            true => ("luks", "key-secret"),
            false => ("qcow2", "encrypt.key-secret"),
        };
        let run = |command: &[&str], password: &str, images: &[&String]| {
            let secret = format!("secret,id=s,data={password}");
            let mut words = command.to_vec();
            let names: Vec<String> = images
                .iter()
                .map(|path| format!("driver={driver},{key}=s,file.filename={path}"))
                .collect();
            words.extend(["--object", &secret, "--image-opts"]);
            words.extend(names.iter().map(String::as_str));
            self.answer(self.programs[0], folder, &words).status.code()
        };
        PASSWORDS.iter().all(|password| {
            let opens = paths.each_ref().map(|path| {
                run(&["bench", "-c", "1", "-s", "512", "-q"], password, &[path]) == Some(0)
            });
            match opens {
                [true, true] => run(&["compare"], password, &[&paths[0], &paths[1]]) == Some(0),
                [theirs, ours] => theirs == ours,
            }
        })
    }
}

fn code(done: &Output) -> String {
    match done.status.code() {
        Some(code) if code == HUNG => "no end".to_owned(),
        Some(code) => code.to_string(),
        None => "a signal".to_owned(),
    }
}

/// Stdout without what truly varies: dates, times, sizes on this host's disk, new UUIDs.
fn stdout(done: &Output, command: &[String]) -> String {
    let text = String::from_utf8_lossy(&done.stdout);
    if command.iter().any(|word| word == "--help" || word == "-h")
        || command.iter().any(|word| word == "-V" || word == "--version")
    {
        // The help is in each program's own words.
        return String::new();
    }
    let varies = [
        "disk size:",
        "\"actual-size\":",
        "Run completed in",
        "\"date-sec\":",
        "\"date-nsec\":",
        "cid:",
        "\"cid\":",
        "uuid:",
        "\"uuid\":",
        "iters:",
        "\"iters\":",
        "master key iters:",
        "\"master-key-iters\":",
    ];
    text.lines()
        .filter(|line| !varies.iter().any(|start| line.trim_start().starts_with(start)))
        .map(|line| line.rsplit('\r').next().unwrap_or_default().to_owned())
        // How often progress is shown depends on the machine.
        .filter(|line| !line.trim_end().ends_with("/100%)") && !line.trim().is_empty())
        .map(|line| format!("{}\n", without_time(&line)))
        .collect()
}

/// A line in which each date with a time is `DATE TIME`: when a command ran.
fn without_time(line: &str) -> String {
    let shape = |word: &str| -> String {
        word.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect()
    };
    let mut words: Vec<&str> = line.split(' ').collect();
    for i in 1..words.len() {
        if shape(words[i - 1]) == "0000-00-00" && shape(words[i]) == "00:00:00" {
            (words[i - 1], words[i]) = ("DATE", "TIME");
        }
    }
    words.join(" ")
}

/// The kind of message that programs match, or nothing. `name` is the program's path.
fn stderr(done: &Output, name: &str) -> String {
    let text = String::from_utf8_lossy(&done.stderr).replace(name, "qemu-img");
    // In any order, since several threads read.
    let mut lost: Vec<_> = text.lines().filter(|line| line.contains("reading offset")).collect();
    if !lost.is_empty() {
        lost.sort_unstable();
        return lost.join("\n");
    }
    // Where the space ended depends on the layout.
    if text.contains("No space left on device") {
        return "No space left on device".to_owned();
    }
    // A warning of three lines may come before or after an error.
    let warning = ["WARNING:", "         ", "qemu-img: warning:"];
    let first = text
        .lines()
        .find(|line| !warning.iter().any(|start| line.starts_with(start)))
        .unwrap_or_default();
    let matched = [
        "No such file or directory",
        "Permission denied",
        "Unknown protocol",
        "Unknown driver",
        "Unknown file format",
        "unrecognized option",
        "invalid option",
        "requires an argument",
        "is ambiguous",
        "doesn't allow an argument",
        "Is another process using",
        "Invalid image size",
        "Command not found",
        "Expecting",
    ];
    match matched.iter().find(|words| text.contains(**words)) {
        Some(_) => first.to_owned(),
        None if first.is_empty() => String::new(),
        None => "a message".to_owned(),
    }
}

/// The names of files that differ from each other. They may still be images of the same disk.
fn different(names: &BTreeSet<String>, folders: &[PathBuf; 2]) -> Vec<String> {
    let differs = |name: &&String| {
        let [theirs, ours] = folders.each_ref().map(|folder| std::fs::read(folder.join(name)));
        theirs.ok() != ours.ok()
    };
    names.iter().filter(differs).cloned().collect()
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).expect("a scratch folder");
    entries
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect()
}
