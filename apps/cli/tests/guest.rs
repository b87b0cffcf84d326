//! Real guests: a Linux whose disk vdkit serves makes a file system, writes, syncs, loses its
//! server, and finds its files.

mod common;

use std::io::Read;
use std::process::Stdio;
use std::time::Duration;

use common::{Scratch, peer};
use rustix::process::{Pid, Signal, kill_process};
use vdkit_testkit::fs::mounted;
use vdkit_testkit::guest::{Guest, require_guest};
use vdkit_testkit::{Killed, require_peer};

/// How long one step in a guest may take: an emulated processor on a busy machine is slow.
const PATIENCE: Duration = Duration::from_secs(240);

struct Served(Killed);

impl Served {
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        Self::image(scratch, "disk.qcow2", arguments)
    }

    fn image(scratch: &Scratch, image: &str, arguments: &[&str]) -> Self {
        let all = [&["serve", image], arguments].concat();
        let (child, line) = common::started(scratch.command(&all).stderr(Stdio::piped()));
        assert!(line.contains(&format!("serving {image} at ")), "{line}");
        Self(child)
    }

    /// Waits for a line on stderr.
    fn warning(&mut self) -> String {
        common::next_line(self.0.stderr.as_mut().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn end(mut self) {
        self.signal(Signal::TERM);
        let status = self.0.wait().unwrap();
        let mut errors = String::new();
        self.0.stderr.as_mut().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!((status.code(), errors.as_str()), (Some(0), ""));
    }

    /// The same, where writes may have waited for space more than once: it comes in pieces.
    fn end_after_waits(mut self) {
        self.signal(Signal::TERM);
        let status = self.0.wait().unwrap();
        let mut errors = String::new();
        self.0.stderr.as_mut().unwrap().read_to_string(&mut errors).unwrap();
        assert_eq!(status.code(), Some(0), "{errors}");
        let known = ["warning: writes wait for space", "there is space again"];
        let all_known = errors.lines().all(|line| known.iter().any(|word| line.starts_with(word)));
        assert!(all_known, "{errors}");
    }

    fn kill(mut self) {
        self.signal(Signal::KILL);
        self.0.wait().unwrap();
    }
}

/// What QEMU is told of a disk at `v.sock`.
const VHOST: [&str; 4] = [
    "-chardev",
    "socket,id=disk,path=v.sock,reconnect=1",
    "-device",
    "vhost-user-blk-pci,chardev=disk,num-queues=2",
];

/// And of one at `n.sock`.
const NBD: [&str; 4] = [
    "-blockdev",
    "driver=nbd,node-name=disk,server.type=unix,server.path=n.sock,reconnect-delay=60,discard=unmap",
    "-device",
    "virtio-blk-pci,drive=disk",
];

/// A file's content: so many lines that say where they belong.
fn content(file: usize) -> Vec<u8> {
    (0..20_000).flat_map(|line| format!("{file} {line}\n").into_bytes()).collect()
}

/// The same in the guest.
const WRITE: &str = "
write() { seq 0 19999 | sed \"s/^/$1 /\" > /mnt/$1; }
";

/// Has a first guest make a file system with files 0 to 9; then comes what `rest` says.
fn first_script(rest: &str) -> String {
    format!(
        "set -e
        mkfs.ext4 -q /dev/vda
        mount -t ext4 -o discard /dev/vda /mnt
        {WRITE}
        for i in $(seq 0 9); do write $i; done
        {rest}"
    )
}

/// Holds files of the image against what was written: from a raw copy, after the file system's
/// journal was replayed as a guest would.
fn expect_files(scratch: &Scratch, image: &str, files: std::ops::Range<usize>) {
    let dir = scratch.path("");
    scratch.ok(&["convert", image, "copy.raw", "-O", "raw"]);
    let fsck = std::process::Command::new("e2fsck")
        .args(["-fy", "copy.raw"])
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .current_dir(&dir)
        .output()
        .unwrap();
    // 1: the journal was replayed, or a count was mended. More would be damage.
    assert!(matches!(fsck.status.code(), Some(0 | 1)), "{fsck:?}");
    let text = String::from_utf8_lossy(&fsck.stdout).into_owned();
    assert!(!text.contains("Inode") || !text.contains("invalid"), "{text}");
    for file in files {
        let request = format!("dump /{file} file.out");
        peer(&dir, "debugfs", &["-R", &request, "copy.raw"]);
        let found = std::fs::read(scratch.path("file.out")).unwrap();
        assert!(found == content(file), "file {file}: {} bytes", found.len());
        std::fs::remove_file(scratch.path("file.out")).unwrap();
    }
    std::fs::remove_file(scratch.path("copy.raw")).unwrap();
}

/// Checked by vdkit and by QEMU.
fn sound(scratch: &Scratch, image: &str, leaks: bool) {
    let code = scratch.run(&["check", image]).code;
    assert!(code == Some(0) || (leaks && code == Some(3)), "{code:?}");
    common::chains::sound(scratch, image, leaks);
}

#[test]
fn a_guest_on_vhost_user() {
    if !require_guest() || !require_peer("debugfs") || !require_peer("e2fsck") {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "512M"]);
    let vhost = ["--vhost-user", "v.sock"];

    // A file system, files, and an orderly end.
    let served = Served::start(&scratch, &vhost);
    let script = first_script(
        "cat /sys/block/vda/serial /sys/block/vda/queue/write_cache
        rm /mnt/9
        sync
        umount /mnt",
    );
    let log = Guest::boot(&scratch.path(""), "first", &VHOST, &script).end(PATIENCE);
    assert!(log.contains("vdkit\n") || log.contains("vdkitwrite back"), "{log}");
    assert!(log.contains("write back"), "{log}");
    served.end();
    sound(&scratch, "disk.qcow2", false);
    expect_files(&scratch, "disk.qcow2", 0..9);

    // The next guest finds them, and loses its server while it writes.
    let served = Served::start(&scratch, &vhost);
    let script = format!(
        "mount -t ext4 /dev/vda /mnt || exit 1
        {WRITE}
        seq 0 19999 | sed 's/^/3 /' | cmp - /mnt/3 || exit 2
        for i in $(seq 10 29); do write $i || exit 3; sync || exit 4; echo synced $i.; done
        for i in $(seq 0 8) $(seq 10 29); do
            seq 0 19999 | sed \"s/^/$i /\" | cmp - /mnt/$i || exit 5
        done
        dmesg | grep -i 'i/o error' && exit 6
        # No orderly end: what was synced has to be enough.
        exit 0"
    );
    let mut guest = Guest::boot(&scratch.path(""), "second", &VHOST, &script);
    guest.wait_for("synced 14.", PATIENCE);
    served.kill();
    std::fs::copy(scratch.path("disk.qcow2"), scratch.path("killed.qcow2")).unwrap();
    // Nobody else may have written to it meanwhile, and nobody has: the guest's disk stands still.
    let served = Served::start(&scratch, &[&vhost[..], &["--control", "c.sock"]].concat());
    // Its images are exchanged while it writes: an overlay comes, and goes into the image beneath.
    guest.wait_for("synced 18.", PATIENCE);
    scratch.ok(&["ctl", "c.sock", "snapshot-external", "over.qcow2"]);
    // Unless this process slept while the guest went on.
    let writes_follow = !guest.log().contains("synced 20.");
    guest.wait_for("synced 22.", PATIENCE);
    let done = scratch.json_of("ctl", 0, &["c.sock", "commit"]);
    assert_eq!(done["filename"], "disk.qcow2");
    assert!(!writes_follow || done["moved-bytes"].as_u64().unwrap() > 0, "{done}");
    let log = guest.end(PATIENCE);
    assert!(log.contains("synced 29."), "{log}");
    served.end();
    sound(&scratch, "killed.qcow2", true);
    expect_files(&scratch, "killed.qcow2", 10..15);
    sound(&scratch, "disk.qcow2", true);
    expect_files(&scratch, "disk.qcow2", 10..30);
}

/// What is at the socket's path is not overwritten, and the image is let go.
#[test]
fn a_path_that_is_taken_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    std::fs::write(scratch.path("v.sock"), "precious").unwrap();
    let answer = scratch.run(&["serve", "disk.qcow2", "--vhost-user", "v.sock"]);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    assert!(answer.stderr.contains("v.sock"), "{answer:?}");
    assert_eq!(std::fs::read(scratch.path("v.sock")).unwrap(), b"precious");
    let answer = scratch.run(&["serve", "disk.qcow2"]);
    assert_eq!(answer.code, Some(2), "{answer:?}");
    let served = Served::start(&scratch, &["--vhost-user", "w.sock", "--nbd", "unix:n.sock"]);
    assert!(scratch.path("w.sock").exists());
    served.end();
    assert!(!scratch.path("w.sock").exists());
}

/// A guest that is killed, and one that loses its server, over NBD.
#[test]
fn a_guest_on_nbd() {
    if !require_guest() || !require_peer("debugfs") || !require_peer("e2fsck") {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "512M"]);
    let nbd = ["--nbd", "unix:n.sock"];

    // A file system, files, a sync; then the power goes.
    let served = Served::start(&scratch, &nbd);
    let script = first_script(
        "sync
        echo synced 9.
        while true; do write 50; write 51; done",
    );
    let mut guest = Guest::boot(&scratch.path(""), "first", &NBD, &script);
    guest.wait_for("synced 9.", PATIENCE);
    guest.kill();
    served.end();
    sound(&scratch, "disk.qcow2", false);
    expect_files(&scratch, "disk.qcow2", 0..10);

    // The next guest finds them, and loses its server while it writes: QEMU connects again and
    // asks again for what was not answered.
    let served = Served::start(&scratch, &nbd);
    let script = format!(
        "mount -t ext4 /dev/vda /mnt || exit 1
        {WRITE}
        for i in $(seq 0 9); do
            seq 0 19999 | sed \"s/^/$i /\" | cmp - /mnt/$i || exit 2
        done
        for i in $(seq 10 29); do write $i || exit 3; sync || exit 4; echo synced $i.; done
        dmesg | grep -i 'i/o error' && exit 5
        umount /mnt || exit 6
        exit 0"
    );
    let mut guest = Guest::boot(&scratch.path(""), "second", &NBD, &script);
    guest.wait_for("synced 14.", PATIENCE);
    served.kill();
    std::fs::copy(scratch.path("disk.qcow2"), scratch.path("killed.qcow2")).unwrap();
    let served = Served::start(&scratch, &nbd);
    let log = guest.end(PATIENCE);
    assert!(log.contains("synced 29."), "{log}");
    served.end();
    sound(&scratch, "killed.qcow2", true);
    expect_files(&scratch, "killed.qcow2", 10..15);
    sound(&scratch, "disk.qcow2", true);
    expect_files(&scratch, "disk.qcow2", 0..30);
}

/// A full file system under a guest: its disk is slow until there is space, and nothing breaks.
#[test]
fn a_guest_of_vhost_user_on_a_full_file_system() {
    a_full_file_system(&["--vhost-user", "v.sock"], &VHOST);
}

#[test]
fn a_guest_of_nbd_on_a_full_file_system() {
    a_full_file_system(&["--nbd", "unix:n.sock"], &NBD);
}

fn a_full_file_system(front: &[&str], disk: &[&str]) {
    if !require_guest() {
        return;
    }
    let Some(small) = mounted("tmpfs", 24 << 20) else { return };
    let scratch = Scratch::new();
    let image = small.path().join("disk.qcow2");
    let image = image.to_str().unwrap();
    scratch.ok(&["create", image, "256M"]);
    let ballast = small.path().join("ballast");
    std::fs::write(&ballast, vec![1; 16 << 20]).unwrap();
    let mut served = Served::image(&scratch, image, front);
    let script = "
        seq 0 1999999 > /tmp/data
        dd if=/tmp/data of=/dev/vda bs=64k conv=fsync || exit 1
        echo 3 > /proc/sys/vm/drop_caches
        cmp -n $(wc -c < /tmp/data) /tmp/data /dev/vda || exit 2
        dmesg | grep -i 'i/o error' && exit 3
        exit 0";
    let guest = Guest::boot(&scratch.path(""), "full", disk, script);
    let warning = served.warning();
    assert!(warning.contains("writes wait for space"), "{warning}");
    std::thread::sleep(Duration::from_secs(2));
    assert!(!guest.log().contains("error"), "{}", guest.log());
    std::fs::remove_file(&ballast).unwrap();
    assert!(served.warning().contains("there is space again"));
    guest.end(PATIENCE);
    served.end_after_waits();
    sound(&scratch, image, false);
}
