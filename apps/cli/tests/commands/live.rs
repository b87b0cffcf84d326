//! `vdkit ctl SOCKET snapshot-external` and `commit` while clients write.

use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

use crate::common::{self, Scratch, peer};
use vdkit_testkit::{Killed, require_fuse};

const URI: &str = "nbd+unix:///?socket=s.sock";

/// A service in the background, killed at the end.
struct Service(Killed);

impl Service {
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        let all = [&["--nbd", "unix:s.sock", "--control", "c.sock"], arguments].concat();
        Self(scratch.serve(&all).0)
    }

    fn quit(mut self, scratch: &Scratch) {
        scratch.ok(&["ctl", "c.sock", "quit"]);
        assert_eq!(self.0.wait().unwrap().code(), Some(0));
    }
}

fn io(scratch: &Scratch, commands: &[&str]) {
    common::nbd_io(scratch, URI, commands);
}

/// fio over NBD: random writes, each verified after all are done.
fn fio(scratch: &Scratch, seconds: u32) -> Command {
    fio_on(scratch, seconds, &["--ioengine=nbd", &format!("--uri={URI}")])
}

/// The same on another way to the disk.
fn fio_on(scratch: &Scratch, seconds: u32, way: &[&str]) -> Command {
    let mut command = Command::new("fio");
    command.current_dir(scratch.folder()).stdin(Stdio::null()).stdout(Stdio::piped()).args([
        "--name=v",
        "--rw=randwrite",
        "--bssplit=4k/60:12k/30:100k/10",
        "--iodepth=8",
        "--size=60M",
        "--verify=crc32c",
        "--verify_backlog=256",
        "--verify_fatal=1",
        "--time_based",
        &format!("--runtime={seconds}"),
    ]);
    command.args(way);
    command
}

/// Waits until the service has done some more writes of this client, or the client has ended.
fn writes_go_on(scratch: &Scratch, client: &mut Child) {
    let writes = || {
        let stats = scratch.json_of("ctl", 0, &["c.sock", "stats"]);
        stats["ops"][1]["ops"].as_u64().unwrap()
    };
    let enough = writes() + 100;
    common::wait_until(|| writes() >= enough || client.try_wait().unwrap().is_some());
}

fn verified(child: Child) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("err= 0"), "{said}");
}

#[test]
fn a_guest_goes_on_over_new_overlays() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "0.qcow2", "64M"]);
    let service = Service::start(&scratch, &["0.qcow2"]);
    io(&scratch, &["write -P 9 63M 64k", "flush"]);
    let mut client = fio(&scratch, 4).spawn().unwrap();
    for layer in 1..5 {
        writes_go_on(&scratch, &mut client);
        let (old, new) = (format!("{}.qcow2", layer - 1), format!("{layer}.qcow2"));
        let answer = scratch.json_of("ctl", 0, &["c.sock", "snapshot-external", &new]);
        let path = scratch.folder().canonicalize().unwrap().join(&new);
        assert_eq!(answer["filename"], path.to_str().unwrap());
        assert_eq!(answer["chain"].as_array().unwrap().len(), layer + 1);
        // The frozen image is closed, and is there for a backup.
        scratch.sound(&old);
        peer(&scratch.folder(), "qemu-img", &["convert", &old, "-O", "raw", &format!("{layer}")]);
        let status = scratch.json_of("ctl", 0, &["c.sock", "status"]);
        assert_eq!(status["chain"], answer["chain"]);
    }
    verified(client);
    let text = scratch.ok(&["ctl", "c.sock", "status"]).stdout;
    assert!(text.contains("4.qcow2 <- ") && text.contains("<- 0.qcow2\n"), "{text}");
    io(&scratch, &["read -P 9 63M 64k"]);
    service.quit(&scratch);
    // Named from the overlay's folder on, so that the folder can be moved.
    let info = scratch.json_of("info", 0, &["1.qcow2"]);
    assert_eq!(info["backing-filename"], "0.qcow2");
    assert_eq!(info["backing-filename-format"], "qcow2");
    for layer in 1..5 {
        let old = format!("{}.qcow2", layer - 1);
        let copy = format!("{layer}");
        peer(&scratch.folder(), "qemu-img", &["compare", &old, "-F", "raw", &copy]);
        scratch.sound(&format!("{layer}.qcow2"));
    }
}

#[test]
fn an_overlay_elsewhere_names_its_image_absolutely() {
    let scratch = Scratch::new();
    for folder in ["images", "images/new", "other"] {
        std::fs::create_dir(scratch.path(folder)).unwrap();
    }
    scratch.ok(&["create", "images/a:1.qcow2", "64M"]);
    let service = Service::start(&scratch, &["images/a:1.qcow2"]);
    io(&scratch, &["write -P 1 0 64k"]);
    for overlay in ["images/b.qcow2", "images/new/c.qcow2", "other/d.qcow2", "e.qcow2"] {
        scratch.ok(&["ctl", "c.sock", "snapshot-external", overlay]);
    }
    service.quit(&scratch);
    let backing = |image: &str| {
        let info = scratch.json_of("info", 0, &[image]);
        info["backing-filename"].as_str().unwrap().to_owned()
    };
    let real = scratch.folder().canonicalize().unwrap();
    assert_eq!(backing("images/b.qcow2"), "./a:1.qcow2");
    assert_eq!(backing("images/new/c.qcow2"), real.join("images/b.qcow2").to_str().unwrap());
    assert_eq!(backing("other/d.qcow2"), real.join("images/new/c.qcow2").to_str().unwrap());
    assert_eq!(backing("e.qcow2"), "other/d.qcow2");
    let all = ["read", "e.qcow2", "--allow-ref", ".", "0", "1"];
    assert_eq!(scratch.ok(&all).bytes, [1]);
    peer(&scratch.folder(), "qemu-io", &["-r", "-c", "read -P 1 0 64k", "e.qcow2"]);
}

#[test]
fn an_overlay_that_must_not_be_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.write("key", b"secret");
    let secret = ["create", "-o", "encrypt.format=luks,encrypt.iter-time=10"];
    scratch.ok(&[&secret[..], &["--key-file", "key", "x.qcow2", "64M"]].concat());
    scratch.write("taken", b"precious");
    let snapshot = ["ctl", "c.sock", "snapshot-external"];
    let before = scratch.names();

    let service = Service::start(&scratch, &["a.qcow2"]);
    scratch.fails(1, "is there already", &[&snapshot[..], &["taken"]].concat());
    scratch.fails(1, "cannot", &[&snapshot[..], &["none/b.qcow2"]].concat());
    scratch.fails(2, "needs a FILE", &snapshot);
    service.quit(&scratch);
    let service = Service::start(&scratch, &["a.qcow2", "--read-only"]);
    scratch.fails(
        1,
        "the served disk: is open for reading only",
        &[&snapshot[..], &["b.qcow2"]].concat(),
    );
    service.quit(&scratch);
    let service = Service::start(&scratch, &["x.qcow2", "--key-file", "key"]);
    scratch.fails(1, "plain text", &[&snapshot[..], &["b.qcow2"]].concat());
    service.quit(&scratch);
    assert_eq!(scratch.names(), before);
    assert_eq!(std::fs::read(scratch.path("taken")).unwrap(), b"precious");
}

#[test]
fn a_guest_goes_on_through_commits() {
    for (base, options) in [("base.qcow2", "cluster_size=16K"), ("base.raw", "")] {
        let scratch = Scratch::new();
        let format = base.rsplit('.').next().unwrap();
        scratch.ok(&["create", "-f", format, "-o", options, base, "64M"]);
        let service = Service::start(&scratch, &[base, "-f", format]);
        io(&scratch, &["write -P 9 63M 64k", "flush"]);
        let mut client = fio(&scratch, 5).spawn().unwrap();
        writes_go_on(&scratch, &mut client);
        for round in 0..4 {
            let overlay = format!("{round}.qcow2");
            scratch.ok(&["ctl", "c.sock", "snapshot-external", &overlay]);
            // Whether or not the client gets to write meanwhile.
            io(&scratch, &["write -P 9 62M 64k"]);
            writes_go_on(&scratch, &mut client);
            // The empty overlays of former rounds stand on the base too.
            let done = scratch.json_of("ctl", 0, &["c.sock", "commit", "--force"]);
            assert_eq!(done["chain"].as_array().unwrap().len(), 1);
            assert_eq!(done["filename"], base);
            assert!(done["moved-bytes"].as_u64().unwrap() >= 65536, "{done}");
            assert!(done["pause-seconds"].as_f64().unwrap() >= 0.0, "{done}");
            let status = scratch.json_of("ctl", 0, &["c.sock", "status"]);
            assert!(status["filename"] == base && status["job"].is_null(), "{status}");
            scratch.ok(&["check", &overlay]);
        }
        verified(client);
        io(&scratch, &["read -P 9 63M 64k", "write -P 8 62M 64k", "flush"]);
        scratch.fails(1, "no commit is running", &["ctl", "c.sock", "commit-cancel"]);
        scratch.fails(1, "has no backing image", &["ctl", "c.sock", "commit"]);
        service.quit(&scratch);
        if format == "qcow2" {
            scratch.sound(base);
        }
        for round in 0..4 {
            let overlay = format!("{round}.qcow2");
            let both = ["compare", "-f", "qcow2", "-F", format, &overlay, base];
            peer(&scratch.folder(), "qemu-img", &both);
        }
    }
}

#[test]
fn a_plain_file_goes_on_over_new_overlays_and_commits() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "64M"]);
    let all = ["base.qcow2", "--fuse", "disk.raw", "--control", "c.sock"];
    let service = Service(scratch.serve(&all).0);
    // The mounted file stays open, and is what the guest knows as its disk.
    let disk = std::fs::File::options().read(true).write(true).open(scratch.path("disk.raw"));
    let disk = disk.unwrap();
    disk.write_all_at(&[9; 65536], 63 << 20).unwrap();
    disk.sync_all().unwrap();
    let way = ["--ioengine=libaio", "--filename=disk.raw", "--allow_file_create=0"];
    let mut client = fio_on(&scratch, 4, &way).spawn().unwrap();
    for round in 0..3 {
        let overlay = format!("{round}.qcow2");
        writes_go_on(&scratch, &mut client);
        scratch.ok(&["ctl", "c.sock", "snapshot-external", &overlay]);
        writes_go_on(&scratch, &mut client);
        let done = scratch.json_of("ctl", 0, &["c.sock", "commit", "--force"]);
        assert_eq!(done["filename"], "base.qcow2");
    }
    scratch.ok(&["ctl", "c.sock", "snapshot-external", "last.qcow2"]);
    verified(client);
    let mut bytes = [0; 65536];
    disk.read_exact_at(&mut bytes, 63 << 20).unwrap();
    assert!(bytes == [9; 65536]);
    drop(disk);
    service.quit(&scratch);
    for image in ["base.qcow2", "last.qcow2"] {
        scratch.sound(image);
    }
    peer(&scratch.folder(), "qemu-io", &["-r", "-c", "read -P 9 63M 64k", "last.qcow2"]);
}

/// Blocks of 64 KiB that are written while a commit is killed.
const BLOCKS: u64 = 64;

/// Each block holds what was flushed last, or a part of what was under way.
struct Written {
    flushed: [u8; BLOCKS as usize],
    under_way: [u8; BLOCKS as usize],
}

impl Written {
    /// Writes rounds of blocks until the service answers no more.
    fn until_the_end(scratch: &Scratch) -> Self {
        let mut written = Self { flushed: [0; BLOCKS as usize], under_way: [0; BLOCKS as usize] };
        let mut round = 0_u8;
        loop {
            // (Far more rounds than usual are possible where the killer is late.)
            round = round % 250 + 1;
            let first = u64::from(round) * 13 % BLOCKS;
            let blocks: Vec<u64> = (0..12).map(|step| (first + step * 5) % BLOCKS).collect();
            for block in &blocks {
                written.under_way[*block as usize] = round;
            }
            if !write_and_flush(scratch, &blocks, round) {
                return written;
            }
            for block in blocks {
                written.flushed[block as usize] = round;
            }
        }
    }

    fn assert_is_in(&self, scratch: &Scratch, image: &str, what: &str) {
        for block in 0..BLOCKS {
            let at = (block * 65536).to_string();
            let bytes = scratch.ok(&["read", image, &at, "49152"]).bytes;
            let (old, new) = (self.flushed[block as usize], self.under_way[block as usize]);
            let fine = bytes.iter().all(|byte| *byte == old || *byte == new);
            assert!(fine, "{what}, block {block}: {old} or {new}");
        }
    }
}

/// Fills blocks with the number of a round and flushes them; returns whether all of it succeeded.
fn write_and_flush(scratch: &Scratch, blocks: &[u64], round: u8) -> bool {
    let mut arguments = vec!["-f".to_owned(), "raw".to_owned(), URI.to_owned()];
    for block in blocks {
        arguments.push("-c".to_owned());
        arguments.push(format!("write -P {round} {} 48k", block * 65536));
    }
    arguments.extend(["-c".to_owned(), "flush".to_owned()]);
    let mut command = Command::new("qemu-io");
    let done = command.current_dir(scratch.folder()).args(&arguments).output().unwrap();
    let said =
        String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    done.status.success() && !said.contains("failed") && !said.contains("rror")
}

/// Leaks are what a crash leaves; damage is not.
fn assert_not_damaged(scratch: &Scratch, image: &str) {
    let code = scratch.run(&["check", image]).code;
    assert!(matches!(code, Some(0 | 3)), "{image}: {code:?}");
}

#[test]
fn a_commit_that_is_killed_loses_nothing_that_was_flushed() {
    for attempt in 0_u64..6 {
        let scratch = Scratch::new();
        scratch.ok(&["create", "base.qcow2", "256M"]);
        scratch.ok(&["create", "top.qcow2", "--backing", "base.qcow2"]);
        let mut service = Service::start(&scratch, &["top.qcow2"]);
        // So much that the commit takes a while.
        io(&scratch, &["write -P 3 64M 128M", "flush"]);
        let commit = scratch
            .command(&["ctl", "c.sock", "commit"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut commit = commit.unwrap();
        let began = std::time::Instant::now();
        let enough = std::time::Duration::from_millis(60 + 170 * attempt);
        let (written, killed) = std::thread::scope(|scope| {
            let child = &mut service.0;
            let killer = scope.spawn(move || {
                std::thread::sleep(enough.saturating_sub(began.elapsed()));
                child.kill().unwrap();
                child.wait().unwrap()
            });
            (Written::until_the_end(&scratch), killer.join().unwrap())
        });
        assert!(!killed.success());
        let _ = commit.wait().unwrap();
        assert_not_damaged(&scratch, "base.qcow2");
        assert_not_damaged(&scratch, "top.qcow2");
        written.assert_is_in(&scratch, "top.qcow2", &format!("attempt {attempt}"));
        let most = ["-f", "qcow2", "-r", "-c", "read -P 3 64M 128M", "top.qcow2"];
        let said = peer(&scratch.folder(), "qemu-io", &most).stdout;
        assert!(!String::from_utf8_lossy(&said).contains("failed"));
        // It can be run to its end.
        let service = Service::start(&scratch, &["top.qcow2"]);
        scratch.ok(&["ctl", "c.sock", "commit"]);
        service.quit(&scratch);
        peer(&scratch.folder(), "qemu-img", &["compare", "top.qcow2", "base.qcow2"]);
        assert_not_damaged(&scratch, "base.qcow2");
    }
}

/// A commit that runs, as soon as the service tells how far it is. Nothing where it was over before
/// that was seen: this process may sleep at any moment.
fn commit_under_way(scratch: &Scratch) -> Option<(Child, serde_json::Value)> {
    let commit = ["ctl", "c.sock", "commit"];
    let mut commit = scratch.command(&commit);
    let mut commit = commit.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while commit.try_wait().unwrap().is_none() {
        let status = scratch.json_of("ctl", 0, &["c.sock", "status"]);
        if status["job"]["bytes-done"].as_u64().is_some_and(|done| done > 0) {
            return Some((commit, status));
        }
    }
    assert!(commit.wait().unwrap().success());
    None
}

/// They would refuse the base that was written to.
#[test]
fn an_overlay_that_records_the_state_of_its_base_is_not_committed_live() {
    let scratch = Scratch::new();
    for format in ["vmdk", "vhdx", "vhd"] {
        let [base, top] = ["base", "top"].map(|name| format!("{name}.{format}"));
        scratch.ok(&["create", &base, "64M"]);
        scratch.ok(&["create", &top, "--backing", &base]);
        let service = Service::start(&scratch, &[&top]);
        io(&scratch, &["write -P 3 0 64k", "flush"]);
        let refused = scratch.fails(1, &top, &["ctl", "c.sock", "commit"]);
        assert!(refused.stderr.contains("end the service"), "{refused:?}");
        service.quit(&scratch);
        assert_eq!(scratch.ok(&["read", &top, "0", "1"]).bytes, [3]);
        // A VHD cannot be emptied.
        let keep: &[&str] = if format == "vhd" { &["--keep"] } else { &[] };
        scratch.ok(&[&["commit", &top][..], keep].concat());
        assert_eq!(scratch.ok(&["read", &base, "0", "1"]).bytes, [3]);
    }
}

/// A disk whose commits take long enough to be stopped.
struct Committed {
    /// Ends before its folder goes.
    service: Service,
    scratch: Scratch,
    top: String,
}

impl Committed {
    fn new() -> Self {
        let scratch = Scratch::new();
        scratch.ok(&["create", "base.qcow2", "1G"]);
        scratch.ok(&["create", "top.qcow2", "--backing", "base.qcow2"]);
        let service = Service::start(&scratch, &["top.qcow2"]);
        let new = Self { service, scratch, top: "top.qcow2".to_owned() };
        new.fill();
        new
    }

    fn fill(&self) {
        io(&self.scratch, &["write -P 3 0 640M", "flush"]);
    }

    /// After a commit that was over too soon: as it was before, on an overlay of another name.
    fn again(&mut self) {
        std::fs::remove_file(self.scratch.path(&self.top)).unwrap();
        self.top.insert(0, 'x');
        self.scratch.ok(&["ctl", "c.sock", "snapshot-external", &self.top]);
        self.fill();
    }

    /// Repeats commits until `stop` has stopped one: it is given a commit and its status, and tells
    /// whether the commit was stopped before its end.
    fn stop_one(&mut self, mut stop: impl FnMut(&mut Self, Child, serde_json::Value) -> bool) {
        let stopped = (0..20).any(|_| {
            let under_way = commit_under_way(&self.scratch);
            let stopped = under_way.is_some_and(|(commit, status)| stop(self, commit, status));
            if !stopped {
                self.again();
            }
            stopped
        });
        assert!(stopped, "it is never there to be stopped");
    }

    /// Both images are whole, and the disk is as it was filled.
    fn assert_whole(&self) {
        for image in ["base.qcow2", &self.top] {
            self.scratch.sound(image);
        }
        assert_eq!(self.scratch.ok(&["read", &self.top, "0", "1"]).bytes, [3]);
    }
}

#[test]
fn a_commit_tells_how_far_it_is_and_can_be_cancelled() {
    let mut disk = Committed::new();
    disk.scratch.ok(&["create", "other.qcow2", "--backing", "base.qcow2"]);
    let refused = disk.scratch.fails(1, "other.qcow2", &["ctl", "c.sock", "commit"]);
    assert!(refused.stderr.contains("--force"), "{refused:?}");
    std::fs::remove_file(disk.scratch.path("other.qcow2")).unwrap();
    disk.stop_one(|disk, commit, status| {
        assert_eq!(status["job"]["kind"], "commit");
        assert!(status["job"]["bytes-left"].as_u64().unwrap() > 0, "{status}");
        let [grown, beside] = [&["resize", "2G"][..], &["commit"]].map(|what| {
            let all = [&["ctl", "c.sock"], what].concat();
            disk.scratch.run(&all)
        });
        let cancelled = disk.scratch.run(&["ctl", "c.sock", "commit-cancel"]);
        let answer = commit.wait_with_output().unwrap();
        if answer.status.success() {
            return false;
        }
        assert_eq!((answer.status.code(), cancelled.code), (Some(1), Some(0)), "{cancelled:?}");
        assert!(String::from_utf8_lossy(&answer.stderr).contains("interrupted"));
        assert_eq!(grown.code, Some(0), "a disk may grow meanwhile: {grown:?}");
        assert_eq!(beside.code, Some(1), "{beside:?}");
        assert!(beside.stderr.contains("a commit is running"), "{beside:?}");
        true
    });
    let status = disk.scratch.json_of("ctl", 0, &["c.sock", "status"]);
    assert!(status["job"].is_null() && status["chain"].as_array().unwrap().len() == 2);
    io(&disk.scratch, &["read -P 3 0 640M", "write -P 4 640M 64k"]);
    disk.scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(disk.service.0.wait().unwrap().code(), Some(0));
    disk.assert_whole();
}

#[test]
fn a_signal_and_the_end_of_the_service_stop_a_commit() {
    let mut disk = Committed::new();
    disk.stop_one(|_, mut commit, _| {
        common::signal(commit.id(), "INT");
        let code = commit.wait().unwrap().code();
        assert!([Some(0), Some(130)].contains(&code), "{code:?}");
        code == Some(130)
    });
    disk.stop_one(|disk, mut commit, _| {
        disk.scratch.ok(&["ctl", "c.sock", "quit"]);
        assert_eq!(disk.service.0.wait().unwrap().code(), Some(0));
        let done = commit.wait().unwrap().success();
        if done {
            disk.service = Service::start(&disk.scratch, &["base.qcow2", "--force"]);
        }
        !done
    });
    disk.assert_whole();
}

/// Whoever appends to the file of a disk knows nothing of commits.
#[test]
fn appends_to_a_growable_file_go_on_while_images_are_exchanged() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "16M"]);
    let service = Service::start(&scratch, &["base.qcow2", "--fuse", "disk", "--growable"]);
    let file = std::fs::OpenOptions::new().write(true).open(scratch.path("disk")).unwrap();
    let mut expected = vec![0; 16 << 20];
    for round in 1..=3_u8 {
        let overlay = scratch.path(&format!("{round}.qcow2")).display().to_string();
        let append = |expected: &mut Vec<u8>, command: &[&str]| {
            let mut command = scratch.command(command).stdout(Stdio::null()).spawn().unwrap();
            let mut appended = 0;
            while appended == 0 || (command.try_wait().unwrap().is_none() && appended < 500) {
                let bytes = [round; 20_000];
                file.write_all_at(&bytes, expected.len() as u64)
                    .unwrap_or_else(|error| panic!("round {round}, append {appended}: {error}"));
                expected.extend(bytes);
                appended += 1;
            }
            command.wait().unwrap().code()
        };
        // An exchange that would not notice that the disk grows says so.
        if append(&mut expected, &["ctl", "c.sock", "snapshot-external", &overlay]) != Some(0) {
            let _ = std::fs::remove_file(&overlay);
            scratch.ok(&["ctl", "c.sock", "snapshot-external", &overlay]);
        }
        file.write_all_at(&vec![round; 16 << 20], 0).unwrap();
        expected[..16 << 20].fill(round);
        assert_eq!(append(&mut expected, &["ctl", "c.sock", "commit", "--force"]), Some(0));
    }
    drop(file);
    service.quit(&scratch);
    scratch.ok(&["check", "base.qcow2"]);
    let bytes = scratch.ok(&["read", "base.qcow2", "0"]).bytes;
    // A disk is made of whole sectors.
    assert!(bytes.len() >= expected.len() && bytes[..expected.len()] == expected);
}
