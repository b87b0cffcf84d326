//! Chains of images with content, made by QEMU's tools.

use std::path::Path;

use vdkit_testkit::Rng;

use super::{Scratch, peer};

/// One image of a chain.
#[derive(Clone, Debug)]
pub struct Link {
    pub name: &'static str,
    /// `raw`, or qcow2 with these options (a comma in front of each).
    pub options: &'static str,
    pub format: &'static str,
    pub bytes: u64,
    /// Compressed clusters of so many bytes can be in it.
    pub compressed: Option<u64>,
}

impl Link {
    pub fn qcow2(name: &'static str, options: &'static str, bytes: u64) -> Self {
        Self { name, options, format: "qcow2", bytes, compressed: None }
    }

    pub fn raw(name: &'static str, bytes: u64) -> Self {
        Self { name, options: "", format: "raw", bytes, compressed: None }
    }

    pub fn compressed(self, cluster: u64) -> Self {
        Self { compressed: Some(cluster), ..self }
    }
}

/// Makes a chain, the lowest image first, and writes to each.
pub fn make(scratch: &Scratch, chain: &[Link], rng: &mut Rng) {
    let dir = scratch.path("");
    for (i, link) in chain.iter().enumerate() {
        let bytes = link.bytes.to_string();
        let options = match i.checked_sub(1).map(|below| &chain[below]) {
            Some(below) => format!("backing_file={},backing_fmt={}", below.name, below.format),
            None => String::new(),
        };
        let options = format!("{options}{}", link.options);
        let options = options.trim_start_matches(',');
        let mut create = vec!["create", "-q", "-f", link.format, link.name, &bytes];
        if !options.is_empty() {
            create.extend(["-o", options]);
        }
        peer(&dir, "qemu-img", &create);
        fill(&dir, link, rng);
    }
}

/// Writes, zeroes and compresses here and there.
pub fn fill(dir: &Path, link: &Link, rng: &mut Rng) {
    let mut commands = Vec::new();
    if let Some(cluster) = link.compressed {
        // First, and each once: QEMU compresses into what has no space only.
        let count = link.bytes / cluster;
        let step = 1 + rng.below(count.div_ceil(8));
        for at in (rng.below(step)..count).step_by(step as usize).take(40) {
            commands.push(format!("write -c -P {} {} {cluster}", 1 + rng.below(255), at * cluster));
        }
    }
    for _ in 0..10 {
        let longest = link.bytes / 6;
        let at = rng.below(link.bytes / 512) * 512;
        let len = ((1 + rng.below(longest / 512)) * 512).min(link.bytes - at);
        let byte = 1 + rng.below(255);
        commands.push(match rng.below(6) {
            0 | 1 => format!("write -z {at} {len}"),
            2 => format!("write -z -u {at} {len}"),
            _ => format!("write -P {byte} {at} {len}"),
        });
    }
    let mut all = vec!["-f", link.format];
    for command in &commands {
        all.extend(["-c", command]);
    }
    all.push(link.name);
    peer(dir, "qemu-io", &all);
}

/// What the guest sees of an image, to a raw file.
pub fn flatten(scratch: &Scratch, link: &str, to: &str) {
    peer(&scratch.path(""), "qemu-img", &["convert", "-O", "raw", link, to]);
}

/// The disk must be the same, sizes too.
pub fn same(scratch: &Scratch, image: (&str, &str), other: (&str, &str)) {
    // (QEMU's strict comparison asks for the same allocation too.)
    let args = ["compare", "-f", image.1, "-F", other.1, image.0, other.0];
    peer(&scratch.path(""), "qemu-img", &args);
    let size = |(name, format): (&str, &str)| {
        let args = ["info", "-f", format, "--output", "json", name];
        let output = peer(&scratch.path(""), "qemu-img", &args);
        let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        info["virtual-size"].as_u64().unwrap()
    };
    assert_eq!(size(image), size(other), "{image:?} {other:?}");
}

/// QEMU must find nothing wrong but, where that is allowed, leaks.
pub fn sound(scratch: &Scratch, image: &str, leaks: bool) {
    let output = std::process::Command::new("qemu-img")
        .args(["check", "-q", "-f", "qcow2", image])
        .current_dir(scratch.path(""))
        .output()
        .unwrap();
    let fine = output.status.success() || (leaks && output.status.code() == Some(3));
    assert!(fine, "{image}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A copy of the whole folder.
pub fn copy(scratch: &Scratch) -> Scratch {
    let copy = Scratch::new();
    for name in scratch.names() {
        let (from, to) = (scratch.path(&name), copy.path(&name));
        let done =
            std::process::Command::new("cp").arg("--sparse=always").args([from, to]).status();
        assert!(done.unwrap().success());
    }
    copy
}

/// Runs a command on a copy of a folder, killed a little later each time, until it ends by itself;
/// `look` sees what each run has left. Where no run could be killed (this process may have slept
/// longer than it asked for), all of it is done again on another copy.
pub fn killed_until_done(made: &Scratch, args: &[&str], look: impl Fn(&Scratch)) -> Scratch {
    for _ in 0..20 {
        let scratch = copy(made);
        let (mut delay, mut killed) = (std::time::Duration::from_millis(1), 0);
        loop {
            let mut command = scratch.command(args);
            let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
            std::thread::sleep(delay);
            child.kill().unwrap();
            let status = child.wait().unwrap();
            look(&scratch);
            if status.code().is_some() {
                assert!(status.success(), "{args:?}: {status}");
                break;
            }
            killed += 1;
            delay = delay * 4 / 3;
        }
        if killed > 0 {
            return scratch;
        }
    }
    panic!("{args:?} is never there to be killed");
}
