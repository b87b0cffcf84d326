//! A real guest: Debian's kernel and busybox under QEMU's emulator, which needs no KVM.
//!
//! `scripts/fetch-guest` puts kernel and busybox into a folder. The initial file system is made
//! here, once a process: busybox, the modules for disks and ext4, and mke2fs with its libraries. A
//! guest runs one script, says how that ended, and powers off.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use vdkit_guest::{Archive, Kernel, Modules};

use crate::{Killed, missing, require_peer};

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

/// Whether a guest can be booted. Where it cannot, prints a line and gives `false`, upon which the
/// test shall return.
///
/// # Panics
/// As [`require_peer`].
pub fn require_guest() -> bool {
    let programs = ["qemu-system-x86_64", "mke2fs", "ldd"];
    if !programs.into_iter().all(require_peer) {
        return false;
    }
    if Kernel::fetched().is_complete() {
        return true;
    }
    missing("there is no kernel for a guest", "run scripts/fetch-guest")
}

fn initial_files() -> io::Result<Vec<u8>> {
    let kernel = Kernel::fetched();
    let mut archive = Archive::default();
    for folder in ["bin", "sbin", "dev", "proc", "sys", "tmp", "etc"] {
        archive.folder(folder);
    }
    archive.file("/bin/busybox", &vdkit_guest::read(&kernel.busybox)?);
    let mut modules = Modules::beneath(&kernel.modules)?;
    for module in MODULES {
        if modules.has(module) {
            modules.load(module)?;
        }
    }
    archive.modules(&modules);
    archive.file("/etc/mke2fs.conf", &fs::read("/etc/mke2fs.conf").unwrap_or_default());
    archive.file("/init", INIT.as_bytes());
    let mke2fs = ["/usr/sbin/mke2fs", "/sbin/mke2fs"].map(Path::new);
    if let Some(path) = mke2fs.into_iter().find(|path| path.is_file()) {
        archive.program(path)?;
        archive.file("/sbin/mkfs.ext4", b"#!/bin/sh\nexec /usr/sbin/mke2fs -t ext4 \"$@\"\n");
    }
    Ok(archive.end())
}

/// A guest that runs; killed when it is dropped.
#[derive(Debug)]
pub struct Guest {
    child: Killed,
    log: PathBuf,
}

impl Guest {
    /// Boots a guest with these arguments to QEMU in addition, and has it run a script of busybox's
    /// shell. Its memory is shared, as vhost-user needs it. Files go into `folder`; guests there
    /// have different names.
    ///
    /// # Panics
    /// If that cannot be done. Call [`require_guest`] first.
    pub fn boot(folder_for: &Path, name: &str, arguments: &[&str], script: &str) -> Self {
        static FILES: OnceLock<Vec<u8>> = OnceLock::new();
        let files = FILES.get_or_init(|| initial_files().expect("the guest's initial files"));
        let mut archive = Archive::default();
        archive.file("/job", script.as_bytes());
        let initrd = folder_for.join(format!("{name}.initrd"));
        fs::write(&initrd, [files.clone(), archive.end()].concat()).expect("initrd");
        let log = folder_for.join(format!("{name}.log"));
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-machine", "q35,memory-backend=memory", "-cpu", "max", "-m", "256M"])
            .args(["-object", "memory-backend-memfd,id=memory,size=256M,share=on"])
            // Emulated atomics are real ones only if a second processor is possible; without them
            // a guest may miss a request's interrupt.
            .args(["-accel", "tcg", "-smp", "1,maxcpus=2"])
            .arg("-kernel")
            .arg(Kernel::fetched().image)
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
        Self { child: Killed(child), log }
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
    /// If that does not happen within `most`, or the guest ends before.
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
    /// If that takes longer than `most`, or the script failed.
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
    pub fn kill(self) {
        drop(self);
    }
}
