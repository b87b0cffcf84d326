//! QEMU's programs on encrypted images.

use std::path::Path;
use std::process::Command;

use vdkit::{Disk, GuestOffset, OpenOptions};
use vdkit_testkit::require_peer;

use crate::kinds::{Image, KINDS, key};

/// Runs a program in a folder, with its file `key` as the secret `s`.
pub fn run(folder: &Path, program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    let (first, rest) = match program {
        "qemu-img" => arguments.split_at(1),
        _ => arguments.split_at(0),
    };
    command.args(first).args(["--object", "secret,id=s,file=key"]).args(rest);
    let output = command.current_dir(folder).output().expect(program);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    // qemu-io prints errors but exits successfully.
    let failed = ["Pattern verification failed", "failed:", "error", "Could not open"];
    let silent = program == "qemu-io" && failed.iter().any(|word| printed.contains(word));
    assert!(output.status.success() && !silent, "{program} {arguments:?}: {printed}");
    printed
}

/// QEMU's arguments to open an encrypted image.
fn opening(format: &str, file: &str) -> String {
    match format {
        "luks" => format!("driver=luks,key-secret=s,file.filename={file}"),
        _ => format!("driver=qcow2,encrypt.key-secret=s,file.filename={file}"),
    }
}

impl Image {
    fn opening(&self) -> String {
        let mut opening = opening(self.kind.format, "image");
        if self.kind.base.is_some_and(|base| base != "raw") {
            opening += ",backing.driver=qcow2,backing.encrypt.key-secret=s,\
                        backing.file.filename=base";
        }
        opening
    }

    /// The whole disk; QEMU checks the image first.
    pub fn read_by_qemu(&self) -> Vec<u8> {
        if self.kind.format == "qcow2" {
            run(self.dir.path(), "qemu-img", &["check", "--image-opts", &self.opening()]);
        }
        let arguments = ["convert", "--image-opts", "-O", "raw", &self.opening(), "flat"];
        run(self.dir.path(), "qemu-img", &arguments);
        std::fs::read(self.dir.path().join("flat")).unwrap()
    }
}

#[test]
fn what_qemu_writes_into_our_images_is_read() {
    if !require_peer("qemu-io") {
        return;
    }
    for kind in KINDS {
        let image = Image::make(kind);
        let opening = image.opening();
        let commands =
            ["--image-opts", &opening, "-c", "write -P 7 5k 70k", "-c", "write -z 20k 8k"];
        run(image.dir.path(), "qemu-io", &commands);
        let mut found = vec![0; 70 << 10];
        image.open(false).read_at(&mut found, GuestOffset(5 << 10)).unwrap();
        let wanted = |at: usize| if ((15 << 10)..(23 << 10)).contains(&at) { 0 } else { 7 };
        assert!(found.iter().enumerate().all(|(at, b)| *b == wanted(at)), "{}", kind.name);
        image.check();
    }
}

/// Every AES cipher, mode and IV generator that QEMU supports, and every common hash: images made
/// by vdkit and written by QEMU, and some made by QEMU (which takes a second each) and written by
/// vdkit.
#[test]
fn ciphers_and_hashes_both_ways() {
    if !require_peer("qemu-io") {
        return;
    }
    let mut kinds = Vec::new();
    for (cipher, mode, vectors) in [
        ("aes-128", "xts", &["plain", "plain64", "essiv"][..]),
        ("aes-192", "xts", &["plain", "plain64"]),
        ("aes-256", "xts", &["plain", "plain64"]),
        ("aes-128", "cbc", &["plain", "plain64", "essiv"]),
        ("aes-256", "cbc", &["plain", "plain64", "essiv"]),
    ] {
        for vector in vectors {
            let hash = if *vector == "essiv" { ",ivgen-hash-alg=sha256" } else { "" };
            kinds.push(format!("cipher-alg={cipher},cipher-mode={mode},ivgen-alg={vector}{hash}"));
        }
    }
    for hash in ["sha1", "sha224", "sha256", "sha384", "sha512", "ripemd160"] {
        kinds.push(format!("cipher-alg=aes-128,hash-alg={hash}"));
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("key"), key().bytes()).unwrap();
    for (number, options) in kinds.iter().enumerate() {
        let format = if number % 2 == 0 { "luks" } else { "qcow2" };
        let prefix = if format == "luks" { "" } else { "encrypt." };
        let mut all = format!("{prefix}iter-time=10");
        if format == "qcow2" {
            all += ",encrypt.format=luks";
        }
        for option in options.split(',') {
            all += &format!(",{prefix}{option}");
        }
        make(dir.path(), format, &all);
        both_write_and_read(dir.path(), format, options);
        if number % 5 == 0 {
            std::fs::remove_file(dir.path().join("image")).unwrap();
            let all = format!("{all},{prefix}key-secret=s");
            run(dir.path(), "qemu-img", &["create", "-q", "-f", format, "-o", &all, "image", "1M"]);
            both_write_and_read(dir.path(), format, options);
        }
    }
}

/// Creates an image with these options.
fn make(folder: &Path, format: &str, options: &str) {
    let driver = vdkit::format(format).unwrap();
    let mut options = vdkit::Options::parse(format, driver.options(), [options]).unwrap();
    options.set_key(Some(key()));
    let path = folder.join("image");
    let new = vdkit::jobs::CreateOptions::new(&path, driver)
        .guest_bytes(1 << 20)
        .options(options)
        .replace(true);
    vdkit::jobs::create(&vdkit::registry(), &new, &vdkit::Monitor::default()).unwrap();
}

/// QEMU writes and vdkit reads, then the reverse.
fn both_write_and_read(folder: &Path, format: &str, what: &str) {
    let image = opening(format, "image");
    run(folder, "qemu-io", &["--image-opts", &image, "-c", "write -P 9 3k 40k"]);
    let writing = OpenOptions::read_write().keys(vec![key()]);
    let disk = Disk::open(&vdkit::registry(), folder.join("image"), &writing).unwrap();
    let mut found = vec![0; 40 << 10];
    disk.read_at(&mut found, GuestOffset(3 << 10)).unwrap();
    assert!(found.iter().all(|b| *b == 9), "{what}");
    disk.write_at(&[5; 1000], GuestOffset(1000)).unwrap();
    disk.write_at(&[6; 100_000], GuestOffset(70_000)).unwrap();
    disk.close().unwrap();
    drop(disk);
    let reads =
        ["-c", "read -P 5 1000 1000", "-c", "read -P 9 3k 40k", "-c", "read -P 6 70000 100000"];
    run(folder, "qemu-io", &[&["--image-opts", image.as_str()][..], &reads].concat());
}

#[test]
fn legacy_aes_is_read_and_not_written() {
    if !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for secret in ["short", "exactly 16 bytes", "more than sixteen bytes"] {
        std::fs::write(dir.path().join("key"), secret).unwrap();
        let content: Vec<u8> = (0..1u32 << 20).map(|i| (i / 300) as u8).collect();
        std::fs::write(dir.path().join("flat"), &content).unwrap();
        let _ = std::fs::remove_file(dir.path().join("image"));
        let options = "encrypt.format=aes,encrypt.key-secret=s,cluster_size=4k";
        let arguments = ["convert", "-f", "raw", "-O", "qcow2", "-o", options, "flat", "image"];
        run(dir.path(), "qemu-img", &arguments);
        let keys = vec![vdkit::Secret::new(secret.as_bytes().to_vec())];
        let (registry, image) = (vdkit::registry(), dir.path().join("image"));
        let reading = OpenOptions::read_only().keys(keys.clone());
        let disk = Disk::open(&registry, &image, &reading).unwrap();
        let mut found = vec![0; 1 << 20];
        disk.read_at(&mut found, GuestOffset(0)).unwrap();
        assert!(found == content, "{secret}");
        drop(disk);
        let error =
            Disk::open(&registry, &image, &OpenOptions::read_write().keys(keys)).unwrap_err();
        assert!(matches!(error.remedy(), Some(vdkit::Remedy::Convert { .. })), "{error}");
    }
}
