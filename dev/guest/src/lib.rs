//! Boot files of a small Linux guest: a kernel, its modules, and initial files with busybox and
//! other programs of this host. Tests and the lab boot QEMU with them, each with its own script.

mod archive;
mod modules;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use archive::Archive;
pub use modules::Modules;

/// A guest kernel and its files.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The image for QEMU's `-kernel`.
    pub image: PathBuf,
    /// A folder of modules, searched recursively.
    pub modules: PathBuf,
    /// A statically linked busybox.
    pub busybox: PathBuf,
}

impl Kernel {
    /// The kernel in [`folder`].
    pub fn fetched() -> Self {
        let folder = folder();
        Self {
            image: folder.join("vmlinuz"),
            modules: folder.join("modules"),
            busybox: folder.join("busybox"),
        }
    }

    /// Whether all of it exists and is readable.
    pub fn is_complete(&self) -> bool {
        fs::File::open(&self.image).is_ok() && self.modules.is_dir() && self.busybox.is_file()
    }
}

/// The folder in which `scripts/fetch-guest` puts a kernel: `VDKIT_GUEST`, or `vdkit-guest` in the
/// user's cache. It contains `vmlinuz`, `modules/` and a static `busybox`.
pub fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("VDKIT_GUEST") {
        return folder.into();
    }
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    cache.unwrap_or_else(|| "/var/cache".into()).join("vdkit-guest")
}

/// A file's content.
///
/// # Errors
/// As [`fs::read`], with the file's name.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path).map_err(|error| about(path, &error))
}

fn about(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// The libraries of a program, with the loader; empty for a static program.
///
/// # Errors
/// There is no `ldd` (Debian's libc-bin).
pub fn libraries(program: &Path) -> io::Result<Vec<PathBuf>> {
    // It fails with a message for a statically linked program.
    let told =
        Command::new("ldd").arg(program).output().map_err(|e| about(Path::new("ldd"), &e))?;
    let text = String::from_utf8_lossy(&told.stdout).into_owned();
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}
