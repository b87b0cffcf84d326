//! A real guest: Debian's kernel and busybox under QEMU's emulator, which needs no KVM.
//!
//! `scripts/fetch-guest` puts kernel and busybox into a folder. The initial file system is made
//! here, once a process: busybox, the modules for disks and ext4, and mke2fs with its libraries. A
//! guest runs one script, says how that ended, and powers off.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::peers::{missing, require_peer};

/// Modules that guests load, with what these need; those that the kernel contains are left out.
const MODULES: [&str; 6] =
    ["virtio_pci", "virtio_blk", "nbd", "crc32c_generic", "libcrc32c", "ext4"];
/// What the guest's script is followed by on the console.
const ENDED: &str = "guest: the script ended with ";

/// What happens in the guest before its script.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
for module in $(cat /modules/list); do insmod /modules/$module; done
mkdir -p /mnt
sh /job
echo \"guest: the script ended with $?\"
poweroff -f
";

/// Where `scripts/fetch-guest` puts things.
fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("VDKIT_GUEST") {
        return folder.into();
    }
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    cache.unwrap_or_else(|| "/var/cache".into()).join("vdkit-guest")
}

/// Whether a guest can be booted. Where it cannot, prints a line and gives `false`, upon which the
/// test shall return.
///
/// # Panics
/// As [`require_peer`].
pub fn require_guest() -> bool {
    let programs = ["qemu-system-x86_64", "mke2fs", "xz", "ldd"];
    if !programs.into_iter().all(require_peer) {
        return false;
    }
    if folder().join("vmlinuz").is_file() {
        return true;
    }
    missing("there is no kernel for a guest", "run scripts/fetch-guest")
}

/// An archive as the kernel unpacks it: cpio, "newc".
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let numbers = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend(b"070701");
        for number in numbers {
            self.bytes.extend(format!("{number:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, b"");
    }

    fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, 0o100_755, content);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }
}

fn output(command: &mut Command) -> io::Result<Vec<u8>> {
    let output = command.stderr(Stdio::inherit()).output()?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(io::Error::other(format!("{command:?} failed"))),
    }
}

/// A module's name and content.
type Module = (String, Vec<u8>);

/// All modules beneath a folder, by name.
fn find_modules(folder: &Path, found: &mut HashMap<String, PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() && !path.is_symlink() {
            find_modules(&path, found)?;
            continue;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some((stem, _)) = name.split_once(".ko") {
            found.insert(stem.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// A module, after those that it says it depends on.
fn load(name: &str, files: &HashMap<String, PathBuf>, loaded: &mut Vec<Module>) -> io::Result<()> {
    let Some(path) = files.get(name) else { return Ok(()) };
    if loaded.iter().any(|(there, _)| there == name) {
        return Ok(());
    }
    let bytes = match path.extension().is_some_and(|extension| extension == "xz") {
        true => output(Command::new("xz").arg("-dc").arg(path))?,
        false => fs::read(path)?,
    };
    let info = bytes.split(|byte| *byte == 0).find_map(|text| text.strip_prefix(b"depends="));
    let depends = String::from_utf8_lossy(info.unwrap_or_default()).replace('-', "_");
    for needed in depends.split(',').filter(|needed| !needed.is_empty()) {
        load(needed, files, loaded)?;
    }
    loaded.push((name.to_owned(), bytes));
    Ok(())
}

/// A program and its libraries, at the places where they are here.
fn program(archive: &mut Archive, path: &Path) -> io::Result<()> {
    let list = String::from_utf8_lossy(&output(Command::new("ldd").arg(path))?).into_owned();
    let libraries = list.split_whitespace().filter(|word| word.starts_with('/'));
    let mut folders = BTreeSet::new();
    let path = path.to_string_lossy();
    for file in libraries.chain([&*path]) {
        let name = file.trim_start_matches('/');
        let above: Vec<&str> = name.match_indices('/').map(|(end, _)| &name[..end]).collect();
        folders.extend(above.iter().map(|folder| (*folder).to_owned()));
    }
    for folder in &folders {
        archive.folder(folder);
    }
    for file in list.split_whitespace().filter(|word| word.starts_with('/')).chain([&*path]) {
        archive.file(file.trim_start_matches('/'), &fs::read(file)?);
    }
    Ok(())
}

fn initial_files() -> io::Result<Vec<u8>> {
    let root = folder();
    let mut archive = Archive::default();
    for folder in ["bin", "sbin", "dev", "proc", "sys", "tmp", "etc", "modules"] {
        archive.folder(folder);
    }
    archive.file("bin/busybox", &fs::read(root.join("busybox"))?);
    let mut names = String::new();
    let (mut files, mut loaded) = (HashMap::new(), Vec::new());
    find_modules(&root.join("modules"), &mut files)?;
    for module in MODULES {
        load(module, &files, &mut loaded)?;
    }
    for (name, bytes) in loaded {
        archive.file(&format!("modules/{name}.ko"), &bytes);
        names.push_str(&name);
        names.push_str(".ko\n");
    }
    archive.file("modules/list", names.as_bytes());
    archive.file("etc/mke2fs.conf", &fs::read("/etc/mke2fs.conf").unwrap_or_default());
    archive.file("init", INIT.as_bytes());
    let mke2fs = ["/usr/sbin/mke2fs", "/sbin/mke2fs"].map(Path::new);
    if let Some(path) = mke2fs.into_iter().find(|path| path.is_file()) {
        program(&mut archive, path)?;
        archive.file("sbin/mkfs.ext4", b"#!/bin/sh\nexec /usr/sbin/mke2fs -t ext4 \"$@\"\n");
    }
    Ok(archive.end())
}

/// A guest that runs; killed when it is dropped.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    log: PathBuf,
}

impl Guest {
    /// Boots a guest with these arguments to QEMU in addition, and has it run a script of busybox's
    /// shell. Its memory is shared, as vhost-user needs it. Files go into `folder`; guests there
    /// have different names.
    ///
    /// # Panics
    /// Where that cannot be done. Call [`require_guest`] first.
    pub fn boot(folder_for: &Path, name: &str, arguments: &[&str], script: &str) -> Self {
        static FILES: OnceLock<Vec<u8>> = OnceLock::new();
        let files = FILES.get_or_init(|| initial_files().expect("the guest's initial files"));
        let mut archive = Archive::default();
        archive.file("job", script.as_bytes());
        let initrd = folder_for.join(format!("{name}.initrd"));
        fs::write(&initrd, [files.clone(), archive.end()].concat()).expect("initrd");
        let log = folder_for.join(format!("{name}.log"));
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-machine", "q35,memory-backend=memory", "-cpu", "max", "-m", "256M"])
            .args(["-object", "memory-backend-memfd,id=memory,size=256M,share=on"])
            .args(["-accel", "tcg"])
            .arg("-kernel")
            .arg(folder().join("vmlinuz"))
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 loglevel=4 panic=-1 rdinit=/init"])
            .arg("-serial")
            .arg(format!("file:{}", log.display()))
            .args(arguments)
            .current_dir(folder_for)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(folder_for.join(format!("{name}.err"))).expect("a file"))
            .spawn()
            .expect("qemu-system-x86_64");
        Self { child, log }
    }

    /// What the console has shown so far.
    pub fn log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    fn complain(&self, what: &str) -> ! {
        let errors = fs::read_to_string(self.log.with_extension("err")).unwrap_or_default();
        panic!("{what}\n{errors}{}", self.log());
    }

    /// Waits until the console shows this text.
    ///
    /// # Panics
    /// Where that does not happen within `most`, or the guest ends before.
    pub fn wait_for(&mut self, text: &str, most: Duration) {
        let began = Instant::now();
        loop {
            let over = self.child.try_wait().expect("a child").is_some();
            if self.log().contains(text) {
                return;
            }
            if over || began.elapsed() > most {
                self.complain(&format!("the guest does not say '{text}'"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the guest has powered off; gives what the console has shown.
    ///
    /// # Panics
    /// Where that takes longer than `most`, or the script failed.
    pub fn end(mut self, most: Duration) -> String {
        let began = Instant::now();
        while self.child.try_wait().expect("a child").is_none() {
            if began.elapsed() > most {
                self.complain("the guest does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let log = self.log();
        if !log.contains(&format!("{ENDED}0\n")) {
            self.complain("the guest's script failed");
        }
        log
    }

    /// Pulls the plug.
    pub fn kill(mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // As above.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
