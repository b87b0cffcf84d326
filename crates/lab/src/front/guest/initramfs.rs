//! A guest's initial files: busybox, the modules for its disk, fio with its libraries.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use vdkit_block::CancelToken;

use super::{ENDED, Kernel, readable};
use crate::peers::{find, need, skip};
use crate::process::Line;

/// What happens before the job.
fn init(disk: &str) -> String {
    format!(
        "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/bin OUT=/dev/ttyS1
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm
for module in $(cat /modules/list); do insmod /modules/$module; done
for i in $(seq 600); do [ -b {disk} ] && break; sleep 0.1; done
stty -F /dev/ttyS1 raw 2>/dev/null
sh /job
echo \"{ENDED}$?\"
poweroff -f
"
    )
}

/// The kernel that guests boot: this host's, else the one in the folder that `VDKIT_GUEST` names
/// (or `~/.cache/vdkit-guest`): `vmlinuz`, `modules/` and a static `busybox`.
///
/// # Errors
/// [`crate::peers::Skip`] where there is none that can be read.
pub(super) fn kernel() -> Result<Kernel> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let host = Kernel {
        image: format!("/boot/vmlinuz-{release}").into(),
        modules: format!("/lib/modules/{release}").into(),
        busybox: find("busybox").unwrap_or_default(),
    };
    let folder = folder();
    let own = Kernel {
        image: folder.join("vmlinuz"),
        modules: folder.join("modules"),
        busybox: folder.join("busybox"),
    };
    let complete = |kernel: &Kernel| {
        fs::File::open(&kernel.image).is_ok() && kernel.modules.is_dir() && kernel.busybox.is_file()
    };
    match [host.clone(), own].into_iter().find(complete) {
        Some(kernel) => Ok(kernel),
        None => skip(format!(
            "no kernel for a guest: {} cannot be read, or {} is missing, or busybox is not installed \
             (apt-get install busybox-static); or put vmlinuz, modules/ and a static busybox into {}",
            host.image.display(),
            host.modules.display(),
            folder.display()
        )),
    }
}

fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("VDKIT_GUEST") {
        return folder.into();
    }
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    cache.unwrap_or_else(|| "/var/cache".into()).join("vdkit-guest")
}

/// An archive as the kernel unpacks it: cpio, "newc" (the kernel's buffer-format.rst).
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
        // namesize, check
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        let numbers = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
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
        if self.folders.insert(name.to_owned()) {
            self.entry(name, 0o040_755, b"");
        }
    }

    /// A file at the absolute path, and the folders above.
    fn file(&mut self, path: &str, content: &[u8]) {
        let name = path.trim_start_matches('/');
        for (end, _) in name.match_indices('/') {
            self.folder(&name[..end]);
        }
        self.entry(name, 0o100_755, content);
    }

    fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }
}

/// All modules beneath a folder, by name.
fn find_modules(folder: &Path, found: &mut HashMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_symlink() {
            continue;
        }
        if path.is_dir() {
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

/// Names of the modules that the kernel contains, as `modules.builtin` lists their paths.
fn built_in(folder: &Path) -> BTreeSet<String> {
    let list = fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
    let name = |line: &str| {
        let file = line.rsplit('/').next().unwrap_or_default();
        file.split(".ko").next().unwrap_or_default().replace('-', "_")
    };
    list.lines().map(name).collect()
}

/// What unpacks a module, by the end of its name.
fn unpacked(path: &Path, cancel: &CancelToken) -> Result<Vec<u8>> {
    let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
    let program = match ending.as_str() {
        "xz" => "xz",
        "zst" => "zstd",
        "gz" => "gzip",
        _ => return readable(path),
    };
    // To a file: modules are no text.
    let target = tempfile_in_memory()?;
    let to = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&target));
    let script = format!("{program} -dc \"$1\" > /proc/{}/fd/{}", std::process::id(), {
        to.rsplit('/').next().unwrap_or_default()
    });
    need(program)?;
    Line::new("/bin/sh").arg("-c").arg(script).arg("sh").arg(path).run(cancel)?;
    fs::read(&to).context("an unpacked module")
}

fn tempfile_in_memory() -> Result<std::os::fd::OwnedFd> {
    use rustix::fs::{MemfdFlags, memfd_create};
    memfd_create("module", MemfdFlags::CLOEXEC).context("memory for a module")
}

struct Modules<'a> {
    files: HashMap<String, PathBuf>,
    built_in: BTreeSet<String>,
    loaded: Vec<(String, Vec<u8>)>,
    cancel: &'a CancelToken,
}

impl Modules<'_> {
    /// A module, after those that it says it depends on.
    fn load(&mut self, name: &str) -> Result<()> {
        if self.built_in.contains(name) || self.loaded.iter().any(|(there, _)| there == name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            return skip(format!("the guest's kernel has no driver '{name}'"));
        };
        let bytes = unpacked(path, self.cancel)?;
        let info = bytes.split(|byte| *byte == 0).find_map(|text| text.strip_prefix(b"depends="));
        let depends = String::from_utf8_lossy(info.unwrap_or_default()).replace('-', "_");
        for needed in depends.split(',').filter(|needed| !needed.is_empty()) {
            self.load(needed)?;
        }
        self.loaded.push((name.to_owned(), bytes));
        Ok(())
    }
}

/// The libraries of a program, with the loader.
fn libraries(program: &Path, cancel: &CancelToken) -> Result<Vec<String>> {
    let ended = Line::new(need("ldd")?).arg(program).run_any(cancel)?;
    let paths = ended.stdout.split_whitespace().filter(|word| word.starts_with('/'));
    Ok(paths.map(str::to_owned).collect())
}

/// Writes the initial files of a guest to `to`, without the job; nothing where they are there.
pub(super) fn write(
    kernel: &Kernel,
    modules: &[&str],
    disk: &str,
    to: &Path,
    cancel: &CancelToken,
) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    let fio = need("fio")?;
    let mut archive = Archive::default();
    for folder in ["bin", "sbin", "dev", "proc", "sys", "tmp", "modules"] {
        archive.folder(folder);
    }
    archive.file("/bin/busybox", &readable(&kernel.busybox)?);
    let mut all = Modules {
        files: HashMap::new(),
        built_in: built_in(&kernel.modules),
        loaded: Vec::new(),
        cancel,
    };
    find_modules(&kernel.modules, &mut all.files)?;
    for module in modules {
        all.load(module)?;
    }
    let mut names = String::new();
    for (name, bytes) in &all.loaded {
        archive.file(&format!("/modules/{name}.ko"), bytes);
        names.push_str(name);
        names.push_str(".ko\n");
    }
    archive.file("/modules/list", names.as_bytes());
    let mut there = BTreeSet::new();
    for program in [&fio, &kernel.busybox] {
        for library in libraries(program, cancel)? {
            if there.insert(library.clone()) {
                archive.file(&library, &readable(Path::new(&library))?);
            }
        }
    }
    archive.file("/usr/bin/fio", &readable(&fio)?);
    archive.file("/init", init(disk).as_bytes());
    fs::write(to, archive.end()).with_context(|| to.display().to_string())
}

/// The initial files with a job: the kernel takes several archives, one after the other.
pub(super) fn with_job(initial: &Path, job: &str, to: &Path) -> Result<()> {
    let mut archive = Archive::default();
    archive.file("/job", job.as_bytes());
    let mut bytes = readable(initial)?;
    if bytes.len() % 4 != 0 {
        bail!("{}: an archive ends between two words", initial.display());
    }
    bytes.extend(archive.end());
    fs::write(to, bytes).with_context(|| to.display().to_string())
}
