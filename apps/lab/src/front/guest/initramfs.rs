//! A guest's initial files: busybox, the modules for its disk, and fio with its libraries.

use std::fs;
use std::io;
use std::path::Path;

use crate::error::{Context, Result, bail};
use vdkit_guest::{Archive, Kernel, Modules};

use super::ENDED;
use crate::peers::{find, need, skip};

/// The script that runs before the job.
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

/// The kernel that guests boot: this host's, or else [`Kernel::fetched`].
///
/// # Errors
/// [`crate::peers::Skip`] if no kernel can be read.
pub(super) fn kernel() -> Result<Kernel> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let host = Kernel {
        image: format!("/boot/vmlinuz-{release}").into(),
        modules: format!("/lib/modules/{release}").into(),
        busybox: find("busybox").unwrap_or_default(),
    };
    match [host.clone(), Kernel::fetched()].into_iter().find(Kernel::is_complete) {
        Some(kernel) => Ok(kernel),
        None => skip(format!(
            "no kernel for a guest: {} cannot be read, or {} is missing, or busybox is not installed \
             (apt-get install busybox-static); or put vmlinuz, modules/ and a static busybox into {}",
            host.image.display(),
            host.modules.display(),
            vdkit_guest::folder().display()
        )),
    }
}

/// Loads a driver from the guest kernel's modules.
fn load(modules: &mut Modules, name: &str) -> Result<()> {
    match modules.load(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => skip(error.to_string()),
        result => Ok(result?),
    }
}

/// Writes a guest's initial files without the job to `to`, unless the file exists.
pub(super) fn write(kernel: &Kernel, modules: &[&str], disk: &str, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    let fio = need("fio")?;
    need("ldd")?;
    let mut archive = Archive::default();
    for folder in ["bin", "sbin", "dev", "proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    archive.file("/bin/busybox", &vdkit_guest::read(&kernel.busybox)?);
    let mut all = Modules::beneath(&kernel.modules)?;
    for module in modules {
        load(&mut all, module)?;
    }
    archive.modules(&all);
    for program in [&fio, &kernel.busybox] {
        for library in vdkit_guest::libraries(program)? {
            archive.file(&library.to_string_lossy(), &vdkit_guest::read(&library)?);
        }
    }
    archive.file("/usr/bin/fio", &vdkit_guest::read(&fio)?);
    archive.file("/init", init(disk).as_bytes());
    fs::write(to, archive.end()).with_context(|| to.display().to_string())
}

/// Appends a job to the initial files: the kernel unpacks several archives one after the other.
pub(super) fn with_job(initial: &Path, job: &str, to: &Path) -> Result<()> {
    let mut archive = Archive::default();
    archive.file("/job", job.as_bytes());
    let mut bytes = vdkit_guest::read(initial)?;
    if bytes.len() % 4 != 0 {
        bail!("{}: an archive ends between two words", initial.display());
    }
    bytes.extend(archive.end());
    fs::write(to, bytes).with_context(|| to.display().to_string())
}
