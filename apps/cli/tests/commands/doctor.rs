//! `vdkit doctor`: what is found, and that the commands it gives mend it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{self, Scratch, peer};
use serde_json::Value;
use vdkit::jobs::DoctorCode;
use vdkit_testkit::{Killed, Rng, fs};

/// What depends on the machine that the test runs on.
const HOST: [&str; 9] = [
    "little-space",
    "overcommitted",
    "in-memory",
    "fragmented-file",
    "no-barriers",
    "copy-on-write",
    "network-file-system",
    "no-direct-io",
    "backing-writable",
];

/// The codes of a path's only image.
fn codes(scratch: &Scratch, code: i32, arguments: &[&str]) -> Vec<String> {
    let answer = scratch.json_of("doctor", code, arguments);
    assert_eq!(answer["images"].as_array().unwrap().len(), 1, "{answer}");
    let findings = answer["images"][0]["findings"].as_array().unwrap();
    let codes = findings.iter().map(|finding| finding["code"].as_str().unwrap().to_owned());
    codes.filter(|code| !HOST.contains(&code.as_str())).collect()
}

/// The command for a finding, with what the user would choose.
fn mend(scratch: &Scratch, code: i32, image: &str, finding: &str) -> Vec<String> {
    let answer = scratch.json_of("doctor", code, &[image]);
    let findings = answer["images"][0]["findings"].as_array().unwrap();
    let found = findings.iter().find(|found| found["code"] == finding);
    let found = found.unwrap_or_else(|| panic!("no {finding} in {answer}"));
    let words = found["mend"].as_array().unwrap();
    words.iter().map(|word| word.as_str().unwrap().to_owned()).collect()
}

/// Runs the command of a finding, and asks that the finding be gone.
fn is_mended(scratch: &Scratch, code: i32, image: &str, finding: &str) {
    let words = mend(scratch, code, image, finding);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[0] {
        "vdkit" => scratch.command(&words[1..]).output().unwrap(),
        other => {
            Command::new(other).args(&words[1..]).current_dir(scratch.path("")).output().unwrap()
        }
    };
    assert_eq!(done.status.code(), Some(0), "{words:?}: {done:?}");
    let after = scratch.json_of("doctor", 0, &[image]);
    let findings = after["images"][0]["findings"].as_array().unwrap();
    assert!(findings.iter().all(|found| found["code"] != finding), "{words:?}: {after}");
}

fn patch(scratch: &Scratch, image: &str, at: u64, change: impl FnOnce(&mut [u8; 8])) {
    let file = OpenOptions::new().read(true).write(true).open(scratch.path(image)).unwrap();
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    change(&mut bytes);
    file.write_all_at(&bytes, at).unwrap();
}

fn field(scratch: &Scratch, image: &str, at: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(scratch.path(image)).unwrap().read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

/// Byte 79 of the header: the lowest incompatible features. Source: qcow2 specification, "Header".
fn set_flag(scratch: &Scratch, image: &str, flag: u8) {
    patch(scratch, image, 72, |bytes| bytes[7] |= flag);
}

#[test]
fn a_healthy_image_has_nothing() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.ok(&["write", "a.qcow2", "0", "1M", "--pattern", "1"]);
    assert_eq!(codes(&scratch, 0, &["a.qcow2"]), [""; 0]);
    assert_eq!(scratch.json_of("doctor", 0, &["a.qcow2"])["images"][0]["checked"], true);
    scratch.ok(&["create", "a.raw", "64M", "-f", "raw"]);
    assert_eq!(codes(&scratch, 0, &["-f", "raw", "a.raw"]), [""; 0]);
    // 32 MiB of L2 tables cover just so much.
    scratch.ok(&["create", "large.qcow2", "256G"]);
    assert_eq!(codes(&scratch, 0, &["large.qcow2"]), [""; 0]);
    let before = std::fs::read(scratch.path("a.qcow2")).unwrap();
    scratch.ok(&["doctor", "a.qcow2"]);
    assert!(std::fs::read(scratch.path("a.qcow2")).unwrap() == before);
}

#[test]
fn flags_and_versions_are_mended() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "old.qcow2", "64M", "-o", "compat=0.10"]);
    is_mended(&scratch, 0, "old.qcow2", "version-2");
    // A name is never taken for an option.
    scratch.ok(&["create", "./-f", "64M", "-f", "qcow2", "-o", "compat=0.10"]);
    let words = ["doctor", "--", "-f"];
    let text = scratch.ok(&words).stdout;
    assert!(text.contains("vdkit amend -o compat=1.1 ./-f\n"), "{text}");
    scratch.ok(&["create", "narrow.qcow2", "64M", "-o", "refcount_bits=1"]);
    let text = scratch.ok(&["doctor", "narrow.qcow2"]).stdout;
    assert!(text.contains("in 0 snapshots at most"), "{text}");
    is_mended(&scratch, 0, "narrow.qcow2", "narrow-refcounts");
    scratch.ok(&["snapshot", "create", "narrow.qcow2", "one"]);
    for (flag, finding, code) in [(1, "not-closed-cleanly", 3), (2, "marked-corrupt", 4)] {
        scratch.ok(&["create", "a.qcow2", "64M"]);
        set_flag(&scratch, "a.qcow2", flag);
        assert_eq!(codes(&scratch, code, &["a.qcow2"]), [finding]);
        is_mended(&scratch, code, "a.qcow2", finding);
        std::fs::remove_file(scratch.path("a.qcow2")).unwrap();
    }
    std::fs::write(scratch.path("odd.raw"), [1; 1000]).unwrap();
    is_mended(&scratch, 3, "odd.raw", "size-not-in-sectors");
    assert_eq!(std::fs::metadata(scratch.path("odd.raw")).unwrap().len(), 1024);
}

#[test]
fn leaks_and_damage_are_mended() {
    let scratch = Scratch::new();
    let made = |name: &str| {
        scratch.ok(&["create", name, "64M"]);
        scratch.ok(&["write", name, "0", "1M", "--pattern", "1"]);
        let table = field(&scratch, name, 40);
        field(&scratch, name, table) & 0x00ff_ffff_ffff_fe00
    };
    // An entry forgotten is a cluster leaked.
    let l2 = made("leak.qcow2");
    patch(&scratch, "leak.qcow2", l2, |bytes| *bytes = [0; 8]);
    assert_eq!(codes(&scratch, 3, &["leak.qcow2"]), ["leaks"]);
    let text = scratch.run(&["doctor", "leak.qcow2"]).stdout;
    assert!(text.contains("warning  leaks: 1 clusters, 65536 bytes\n"), "{text}");
    assert!(text.contains("\n           vdkit check --repair leaks leak.qcow2\n"), "{text}");
    is_mended(&scratch, 3, "leak.qcow2", "leaks");
    // An entry that points past the end.
    let l2 = made("damaged.qcow2");
    let entry: u64 = (1 << 63) | (1 << 40);
    patch(&scratch, "damaged.qcow2", l2, |bytes| *bytes = entry.to_be_bytes());
    assert!(codes(&scratch, 4, &["damaged.qcow2"]).contains(&"corrupt".to_owned()));
    is_mended(&scratch, 4, "damaged.qcow2", "corrupt");
}

#[test]
fn the_cache_that_an_image_needs() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1T", "-o", "cluster_size=8K"]);
    assert_eq!(codes(&scratch, 0, &["a.qcow2"]), ["l2-cache", "small-clusters"]);
    let text = scratch.ok(&["doctor", "a.qcow2"]).stdout;
    assert!(text.contains("1024 MiB of L2 tables"), "{text}");
    assert!(text.contains("default cache of 32 MiB covers 32 GiB"), "{text}");
    // The command serves, and the cache covers the map.
    let mut words = mend(&scratch, 0, "a.qcow2", "l2-cache");
    words.iter_mut().for_each(|word| *word = word.replace("SOCKET", "s.sock"));
    words.extend(["--control", "c.sock"].map(str::to_owned));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (mut child, _) = common::started(&mut scratch.command(&words[1..]));
    let cache = &scratch.json_of("ctl", 0, &["c.sock", "stats"])["map-cache"];
    assert_eq!(cache["map-bytes"], 1 << 30);
    assert_eq!(cache["map-bytes"], cache["capacity-bytes"]);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // An image with the clusters that are advised has neither finding.
    let words = mend(&scratch, 0, "a.qcow2", "small-clusters");
    let option = words.iter().find(|word| word.starts_with("cluster_size=")).unwrap();
    scratch.ok(&["create", "b.qcow2", "1T", "-o", option]);
    assert_eq!(codes(&scratch, 0, &["b.qcow2"]), [""; 0]);
    scratch.ok(&["create", "c.qcow2", "256G", "-o", "extended_l2=on"]);
    assert_eq!(codes(&scratch, 0, &["c.qcow2"]), ["l2-cache"]);
}

#[test]
fn space_is_found() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "256M"]);
    scratch.ok(&["write", "a.qcow2", "0", "1M", "--pattern", "1"]);
    scratch.ok(&["convert", "--compress", "a.qcow2", "-O", "qcow2", "small.qcow2"]);
    assert_eq!(codes(&scratch, 0, &["small.qcow2"]), ["compressed"]);
    let words = mend(&scratch, 0, "small.qcow2", "compressed");
    scratch.ok(&words[1..].iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(codes(&scratch, 0, &["NEW"]), [""; 0]);
    // Bytes behind the last cluster in use.
    let file = OpenOptions::new().append(true).open(scratch.path("a.qcow2")).unwrap();
    std::io::Write::write_all(&mut &file, &vec![1; 64 << 20]).unwrap();
    assert_eq!(codes(&scratch, 0, &["a.qcow2"]), ["unused-space"]);
    is_mended(&scratch, 0, "a.qcow2", "unused-space");
    // A full image and a preallocated one have none.
    scratch.ok(&["create", "full.qcow2", "64M", "-o", "preallocation=full"]);
    scratch.ok(&["create", "tiny.qcow2", "64M", "-o", "preallocation=full,cluster_size=512"]);
    assert_eq!(codes(&scratch, 0, &["full.qcow2"]), [""; 0]);
    assert_eq!(codes(&scratch, 0, &["tiny.qcow2"]), ["cluster-below-block"]);
    let words = mend(&scratch, 0, "tiny.qcow2", "cluster-below-block");
    std::fs::remove_file(scratch.path("NEW")).unwrap();
    scratch.ok(&words[1..].iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(codes(&scratch, 0, &["NEW"]), [""; 0]);
}

fn evidence(scratch: &Scratch, image: &str) -> Value {
    scratch.json_of("doctor", 0, &[image])["images"][0]["evidence"].clone()
}

#[test]
fn the_figures_are_those_of_other_tools() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "sparse.qcow2", "64M"]);
    for (name, preallocation, allocation) in [
        ("metadata.qcow2", "metadata", "metadata"),
        ("falloc.qcow2", "falloc", "full"),
        ("full.qcow2", "full", "full"),
    ] {
        let option = format!("preallocation={preallocation}");
        scratch.ok(&["create", name, "64M", "-o", &option]);
        assert_eq!(evidence(&scratch, name)["allocation"], allocation, "{name}");
    }
    let sparse = evidence(&scratch, "sparse.qcow2");
    assert_eq!((&sparse["allocation"], &sparse["map-bytes"]), (&"sparse".into(), &8192.into()));
    assert_eq!((&sparse["chain-images"], &sparse["snapshots"]), (&1.into(), &0.into()));
    // What the host says.
    let stat = |format: &str, file: &str| {
        let said = peer(&scratch.path(""), "stat", &["-c", format, file]).stdout;
        String::from_utf8(said).unwrap().trim().parse::<u64>().unwrap()
    };
    assert_eq!(sparse["block-bytes"], stat("%o", "sparse.qcow2"));
    let full = evidence(&scratch, "full.qcow2");
    assert_eq!(full["allocated-bytes"], stat("%b", "full.qcow2") * 512);
    let kind = peer(&scratch.path(""), "findmnt", &["-n", "-o", "FSTYPE", "-T", "."]).stdout;
    assert_eq!(full["file-system"], String::from_utf8(kind).unwrap().trim());
    // Nothing of the disk is allocated, and all of it may come.
    let (size, map) = (64 << 20, 8192);
    assert_eq!(sparse["growth-bytes"], size + map - stat("%b", "sparse.qcow2") * 512);
    scratch.ok(&["snapshot", "create", "full.qcow2", "one"]);
    assert_eq!(evidence(&scratch, "full.qcow2")["growth-bytes"], size + map);
}

#[test]
fn many_snapshots_are_mended_one_by_one() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for i in 0..8 {
        assert_eq!(codes(&scratch, 0, &["a.qcow2"]), [""; 0]);
        scratch.ok(&["snapshot", "create", "a.qcow2", &format!("s{i}")]);
    }
    assert_eq!(codes(&scratch, 0, &["a.qcow2"]), ["many-snapshots"]);
    is_mended(&scratch, 0, "a.qcow2", "many-snapshots");
}

#[test]
fn a_shuffled_map_is_found_and_mended() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "16M", "-o", "cluster_size=4K"]);
    // Clusters are allocated as they are written: backwards, in one run of another program.
    let mut words = vec!["-f".to_owned(), "qcow2".to_owned()];
    for i in (0..2000).rev() {
        words.extend(["-c".to_owned(), format!("write {} 4k", i * 4096)]);
    }
    words.push("a.qcow2".to_owned());
    peer(&scratch.path(""), "qemu-io", &words.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(codes(&scratch, 0, &["a.qcow2"]), ["fragmented-map"]);
    let check = peer(&scratch.path(""), "qemu-img", &["check", "--output=json", "a.qcow2"]);
    let check: Value = serde_json::from_slice(&check.stdout).unwrap();
    let found = evidence(&scratch, "a.qcow2");
    assert_eq!(found["fragmented-clusters"], check["fragmented-clusters"]);
    assert_eq!(found["allocated-clusters"], check["allocated-clusters"]);
    let words = mend(&scratch, 0, "a.qcow2", "fragmented-map");
    scratch.ok(&words[1..].iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(codes(&scratch, 0, &["NEW"]), [""; 0]);
}

/// The codes of an image on a file system made for the test.
fn codes_on(image: &std::path::Path) -> Vec<String> {
    let scratch = Scratch::new();
    let answer = scratch.run(&["doctor", "--json", image.to_str().unwrap()]);
    let answer: Value = serde_json::from_str(&answer.stdout).unwrap();
    let findings = answer["images"][0]["findings"].as_array().unwrap();
    findings.iter().map(|finding| finding["code"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn file_systems_have_their_own_findings() {
    let scratch = Scratch::new();
    if let Some(memory) = fs::mounted("tmpfs", 64 << 20) {
        let image = memory.path().join("a.qcow2");
        scratch.ok(&["create", image.to_str().unwrap(), "1M"]);
        assert!(codes_on(&image).contains(&"in-memory".to_owned()));
        let first = scratch.json_of("doctor", 0, &[image.to_str().unwrap()]);
        assert_eq!(first["images"][0]["evidence"]["cache"], "writeback");
        // Together they may need more than there is, each alone not.
        let second = memory.path().join("b.qcow2");
        let folder = memory.path().to_str().unwrap();
        for (image, size) in [(&image, "40M"), (&second, "41M")] {
            let _ = std::fs::remove_file(image);
            scratch.ok(&["create", image.to_str().unwrap(), size]);
            assert!(!codes_on(image).contains(&"little-space".to_owned()));
        }
        let answer = scratch.json_of("doctor", 0, &[folder]);
        assert_eq!(answer["findings"][0]["code"], "overcommitted", "{answer}");
        let text = scratch.ok(&["doctor", folder]).stdout;
        assert!(text.contains("\n  advice   overcommitted: 2 images"), "{text}");
        // The image that takes the most space may be a raw one.
        std::fs::remove_file(&image).unwrap();
        let (raw, over) = (memory.path().join("a.raw"), memory.path().join("over.qcow2"));
        let raw = raw.to_str().unwrap();
        scratch.ok(&["create", "-f", "raw", raw, "40M"]);
        File::options().write(true).open(raw).unwrap().write_all_at(&[1; 4 << 20], 0).unwrap();
        scratch.ok(&["create", over.to_str().unwrap(), "-b", raw, "-F", "raw"]);
        let answer = scratch.json_of("doctor", 0, &[folder]);
        let mend = &answer["findings"][0]["mend"];
        assert_eq!(mend, &serde_json::json!(["vdkit", "compact", "-f", "raw", raw]), "{answer}");
    }
    if let Some(ext4) = fs::mounted_with("ext4", 64 << 20, "nobarrier") {
        let image = ext4.path().join("a.raw");
        // What is left free are single blocks, so a file made of them lies in pieces.
        let block = [1; 4096];
        for i in 0..8000 {
            if std::fs::write(ext4.path().join(format!("{i}")), block).is_err() {
                break;
            }
        }
        peer(ext4.path(), "sync", &[]);
        for i in (0..8000).step_by(2) {
            let _ = std::fs::remove_file(ext4.path().join(format!("{i}")));
        }
        peer(ext4.path(), "sync", &[]);
        let mut file = File::create(&image).unwrap();
        while std::io::Write::write_all(&mut file, &block).is_ok() {}
        file.sync_all().unwrap();
        let found = codes_on(&image);
        assert!(found.contains(&"no-barriers".to_owned()), "{found:?}");
        assert!(found.contains(&"fragmented-file".to_owned()), "{found:?}");
    }
}

#[test]
fn flushes_reach_the_device_again() {
    let scratch = Scratch::new();
    for kind in ["ext4", "btrfs"] {
        let Some(mounted) = fs::mounted_with(kind, 256 << 20, "nobarrier") else { return };
        let image = mounted.path().join("a.raw").display().to_string();
        scratch.ok(&["create", &image, "1M"]);
        is_mended(&scratch, 3, &image, "no-barriers");
    }
}

#[test]
fn whoever_ignores_flushes_is_named() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let served =
        |cache: &str| scratch.serve(&["a.qcow2", "--nbd", "unix:s.sock", "--cache", cache]).0;
    for (cache, code, found) in
        [("writeback", 0, &["in-use"][..]), ("unsafe", 3, &["flushes-ignored", "in-use"])]
    {
        let mut child = served(cache);
        let answer = codes(&scratch, code, &["a.qcow2"]);
        child.kill().unwrap();
        child.wait().unwrap();
        let _ = std::fs::remove_file(scratch.path("s.sock"));
        assert_eq!(answer, found, "{cache}");
    }
    let file = scratch.path("a.qcow2");
    let drive = format!("driver=file,node-name=f,filename={},cache.no-flush=on", file.display());
    let image = "driver=qcow2,node-name=q,file=f";
    let qemu = Command::new("qemu-storage-daemon")
        .args(["--blockdev", &drive, "--blockdev", image])
        .args(["--nbd-server", "addr.type=unix,addr.path=q.sock"])
        .args(["--export", "type=nbd,id=e,node-name=q,writable=on"])
        .current_dir(scratch.path(""))
        .spawn();
    let qemu = Killed(qemu.unwrap());
    let words = format!(
        "flushes-ignored: process {} (qemu-storage-daemon) has it open with \
                 'cache.no-flush=on'",
        qemu.id()
    );
    // Some time after its start.
    common::wait_until(|| scratch.run(&["doctor", "a.qcow2"]).stdout.contains(&words));
}

#[test]
fn libvirt_gets_its_element() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.raw", "1T", "-f", "raw"]);
    let options = "cluster_size=8K";
    scratch.ok(&["create", "it's.qcow2", "-b", "base.raw", "-F", "raw", "-o", options]);
    let answer = scratch.json_of("doctor", 0, &["--libvirt", "it's.qcow2"]);
    let xml = answer["images"][0]["libvirt"].as_str().unwrap();
    let folder = scratch.path("").canonicalize().unwrap();
    let folder = folder.display();
    let cache = answer["images"][0]["evidence"]["cache"].as_str().unwrap();
    for line in [
        format!("<driver name='qemu' type='qcow2' cache='{cache}' io='threads' discard='unmap'>"),
        "<max_size unit='bytes'>1073741824</max_size>".to_owned(),
        format!("<source file='{folder}/it&apos;s.qcow2'/>"),
        format!("<source file='{folder}/base.raw'/>"),
    ] {
        assert!(xml.contains(&line), "{line}: {xml}");
    }
    let text = scratch.ok(&["doctor", "--libvirt", "it's.qcow2"]).stdout;
    assert!(text.contains("\n    <disk type='file' device='disk'>\n"), "{text}");
    // Without being asked it says nothing of it.
    let answer = scratch.json_of("doctor", 0, &["it's.qcow2"]);
    assert!(answer["images"][0].get("libvirt").is_none());
    // A chain that goes on out of reach has no end: the guest would read zeroes from there on.
    std::fs::create_dir(scratch.path("folder")).unwrap();
    scratch.ok(&["create", "folder/base.qcow2", "1M"]);
    scratch.ok(&["create", "mid.qcow2", "--backing", "folder/base.qcow2"]);
    scratch.ok(&["create", "top.qcow2", "--backing", "mid.qcow2"]);
    let whole = scratch.json_of("doctor", 0, &["--libvirt", "top.qcow2"]);
    let xml = whole["images"][0]["libvirt"].as_str().unwrap();
    assert!(xml.contains("base.qcow2") && xml.contains("<backingStore/>"), "{xml}");
    std::fs::rename(scratch.path("folder"), scratch.path("elsewhere")).unwrap();
    let answer = scratch.run(&["doctor", "--json", "--libvirt", "top.qcow2"]);
    assert!(answer.stdout.contains("<disk type="), "{answer:?}");
    assert!(!answer.stdout.contains("backingStore"), "{answer:?}");
    // libvirt does not know every format of ours: such a disk is served.
    scratch.ok(&["create", "-f", "vhdx", "a.vhdx", "16M"]);
    let answer = scratch.json_of("doctor", 0, &["--libvirt", "a.vhdx"]);
    let xml = answer["images"][0]["libvirt"].as_str().unwrap();
    assert!(xml.contains("protocol='nbd'") && xml.contains("/run/vdkit-disk.sock"), "{xml}");
    scratch.ok(&["create", "full.raw", "1M", "-f", "raw", "-o", "preallocation=full"]);
    let full = scratch.json_of("doctor", 0, &["-f", "raw", "--libvirt", "full.raw"]);
    let xml = full["images"][0]["libvirt"].as_str().unwrap();
    assert_eq!(xml.contains("io='native'"), cache == "none", "{xml}");
}

#[test]
fn what_an_image_stands_on() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "64M"]);
    // (vdkit itself always names the format.)
    peer(&scratch.path(""), "qemu-img", &["create", "-q", "-f", "qcow2", "over.qcow2", "64M"]);
    scratch.ok(&["rebase", "-u", "-b", "base.qcow2", "-F", "qcow2", "over.qcow2"]);
    assert_eq!(codes(&scratch, 0, &["over.qcow2"]), [""; 0]);
    is_mended(&scratch, 0, "over.qcow2", "backing-writable");
    let mode = |name: &str| std::fs::metadata(scratch.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("base.qcow2") & 0o222, 0);

    let base = scratch.path("base.qcow2").canonicalize().unwrap();
    let base = base.to_str().unwrap();
    scratch.ok(&["rebase", "-u", "-b", base, "-F", "qcow2", "over.qcow2"]);
    assert_eq!(codes(&scratch, 0, &["over.qcow2"]), ["backing-absolute"]);
    is_mended(&scratch, 0, "over.qcow2", "backing-absolute");

    // The extension with the format's name becomes one of an unknown kind. Source: qcow2
    // specification, "Header extensions".
    let mut at = field(&scratch, "over.qcow2", 96) & 0xffff_ffff;
    loop {
        let extension = field(&scratch, "over.qcow2", at);
        match extension >> 32 {
            0xe279_2aca => break,
            0 => panic!("the image does not name the format"),
            _ => at += 8 + (extension & 0xffff_ffff).next_multiple_of(8),
        }
    }
    patch(&scratch, "over.qcow2", at, |bytes| bytes[..4].copy_from_slice(&[0x7f, 1, 2, 3]));
    assert_eq!(codes(&scratch, 3, &["over.qcow2"]), ["backing-format-missing"]);
    is_mended(&scratch, 3, "over.qcow2", "backing-format-missing");

    let now = std::time::SystemTime::now() + Duration::from_secs(60);
    File::open(scratch.path("base.qcow2")).unwrap().set_modified(now).unwrap();
    assert_eq!(codes(&scratch, 0, &["over.qcow2"]), ["backing-newer"]);

    std::fs::rename(scratch.path("base.qcow2"), scratch.path("NEW")).unwrap();
    let answer = scratch.json_of("doctor", 4, &["over.qcow2"]);
    assert_eq!(answer["orphans"], serde_json::json!(["over.qcow2"]));
    is_mended(&scratch, 4, "over.qcow2", "backing-missing");
}

#[test]
fn names_that_lead_elsewhere() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("in")).unwrap();
    scratch.ok(&["create", "base.qcow2", "64M"]);
    scratch.ok(&["create", "in/a.qcow2", "64M", "-u", "-b", "../base.qcow2", "-F", "qcow2"]);
    assert_eq!(codes(&scratch, 3, &["in/a.qcow2"]), ["backing-refused"]);
    is_mended_by_looking(&scratch, "in/a.qcow2");
    for name in ["/etc/passwd", "json:{\"driver\":\"file\"}", "nbd://host/x"] {
        std::fs::remove_file(scratch.path("in/a.qcow2")).unwrap();
        scratch.ok(&["create", "in/a.qcow2", "64M", "-u", "-b", name, "-F", "raw"]);
        assert_eq!(codes(&scratch, 3, &["in/a.qcow2"]), ["backing-refused"], "{name}");
    }
    // A circle has no end.
    for (name, on) in [("x.qcow2", "y.qcow2"), ("y.qcow2", "x.qcow2")] {
        scratch.ok(&["create", name, "1M", "-u", "-b", on, "-F", "qcow2"]);
    }
    assert_eq!(codes(&scratch, 4, &["x.qcow2"]), ["backing-broken"]);
    // Many images in one chain.
    scratch.ok(&["create", "0.qcow2", "1M"]);
    for i in 1..17 {
        let (name, on) = (format!("{i}.qcow2"), format!("{}.qcow2", i - 1));
        scratch.ok(&["create", &name, "--backing", &on]);
    }
    assert_eq!(codes(&scratch, 0, &["15.qcow2"]), [""; 0]);
    assert_eq!(codes(&scratch, 0, &["16.qcow2"]), ["deep-chain"]);
    is_mended(&scratch, 0, "16.qcow2", "deep-chain");
    // The lowest is often raw, which no program recognizes.
    scratch.ok(&["create", "-f", "raw", "low.raw", "1M"]);
    scratch.ok(&[
        "rebase",
        "--unsafe",
        "0.qcow2",
        "--backing",
        "low.raw",
        "--backing-format",
        "raw",
    ]);
    assert_eq!(codes(&scratch, 0, &["15.qcow2"]), ["deep-chain"]);
    is_mended(&scratch, 0, "15.qcow2", "deep-chain");
    scratch.ok(&["create", "apart.qcow2", "1M", "-o", "data_file=apart.data"]);
    assert_eq!(codes(&scratch, 0, &["apart.qcow2"]), [""; 0]);
    std::fs::remove_file(scratch.path("apart.data")).unwrap();
    assert_eq!(codes(&scratch, 4, &["apart.qcow2"]), ["data-file-missing"]);
}

/// The command of `backing-refused` is doctor's own, which then finds no more of it.
fn is_mended_by_looking(scratch: &Scratch, image: &str) {
    let words = mend(scratch, 3, image, "backing-refused");
    let words: Vec<&str> = words[2..].iter().map(String::as_str).collect();
    assert_eq!(codes(scratch, 0, &words), [""; 0]);
}

#[test]
fn an_image_in_use_is_left_alone() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M", "-o", "lazy_refcounts=on"]);
    let (mut child, _) = scratch.serve(&["a.qcow2", "--nbd", "unix:s.sock"]);
    let io = ["-f", "raw", "nbd+unix:///?socket=s.sock", "-c", "write 0 1M", "-c", "flush"];
    peer(&scratch.path(""), "qemu-io", &io);
    assert_eq!(codes(&scratch, 0, &["a.qcow2"]), ["in-use"]);
    // What a kill leaves is found, and mended.
    child.kill().unwrap();
    child.wait().unwrap();
    let found = codes(&scratch, 3, &["a.qcow2"]);
    assert!(found.contains(&"not-closed-cleanly".to_owned()), "{found:?}");
    is_mended(&scratch, 3, "a.qcow2", "not-closed-cleanly");
}

#[test]
fn a_bitmap_that_was_not_saved() {
    let scratch = Scratch::new();
    for (image, name, words) in
        [("a.qcow2", "one two", "a.qcow2 'one two'"), ("b.qcow2", "-x", "b.qcow2 -- -x")]
    {
        scratch.ok(&["create", image, "64M"]);
        scratch.ok(&["bitmap", "add", image, "--", name]);
        assert_eq!(codes(&scratch, 0, &[image]), [""; 0]);
        // QEMU saves bitmaps when it closes the image, which it is kept from here.
        let io = ["-f", "qcow2", "-c", "write 0 64k", "-c", "sigraise 9", image];
        let killed =
            Command::new("qemu-io").args(io).current_dir(scratch.path("")).output().unwrap();
        assert_eq!(killed.status.code(), None, "{killed:?}");
        assert_eq!(codes(&scratch, 3, &[image]), ["bitmap-not-saved"]);
        let text = scratch.run(&["doctor", image]).stdout;
        assert!(text.contains(&format!("vdkit bitmap remove {words}\n")), "{text}");
        is_mended(&scratch, 3, image, "bitmap-not-saved");
    }
}

#[test]
fn a_folder_is_summed_up() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("images")).unwrap();
    assert_eq!(scratch.ok(&["doctor", "images"]).stdout.lines().count(), 1);
    scratch.ok(&["create", "images/a.qcow2", "1M"]);
    scratch.ok(&["create", "images/base.raw", "1M", "-f", "raw"]);
    scratch.ok(&["create", "images/over.qcow2", "-b", "base.raw", "-F", "raw"]);
    scratch.ok(&["create", "images/orphan.qcow2", "1M", "-u", "-b", "gone", "-F", "raw"]);
    scratch.write("images/notes.txt", b"not an image");
    scratch.write("images/cut.qcow2", b"QFI\xfb\0\0\0\x03");
    let answer = scratch.json_of("doctor", 4, &["images"]);
    let names: Vec<&str> = answer["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| image["path"].as_str().unwrap().rsplit('/').next().unwrap())
        .collect();
    assert_eq!(names, ["a.qcow2", "base.raw", "cut.qcow2", "orphan.qcow2", "over.qcow2"]);
    assert_eq!(answer["errors"], 2);
    let of = |name: &str| {
        let at = names.iter().position(|found| *found == name).unwrap();
        answer["images"][at]["findings"].as_array().unwrap().clone()
    };
    assert_eq!(of("cut.qcow2")[0]["code"], "unreadable");
    assert_eq!(of("orphan.qcow2")[0]["code"], "backing-missing");
    assert!(of("a.qcow2").iter().all(|found: &Value| found["severity"] == "advice"));
    let orphans = answer["orphans"].as_array().unwrap();
    assert!(orphans.len() == 1 && orphans[0].as_str().unwrap().ends_with("orphan.qcow2"));
    let text = scratch.run(&["doctor", "images"]).stdout;
    assert!(text.contains("\n5 images: 2 errors, 0 warnings, "), "{text}");
    assert!(text.contains("\norphan: "), "{text}");
    // Folders within are looked into when that is asked for.
    assert!(!scratch.ok(&["doctor", "."]).stdout.contains("orphan"));
    assert_eq!(scratch.run(&["doctor", "-r", "."]).code, Some(4));
    scratch.fails(2, "--format", &["doctor", "-f", "raw", "images"]);
    scratch.fails(1, "no-such", &["doctor", "no-such"]);
}

#[test]
fn a_stranger_does_no_harm() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "made.qcow2", "64M", "-o", "cluster_size=4K"]);
    scratch.ok(&["write", "made.qcow2", "0", "1M", "--pattern", "1"]);
    let made = std::fs::read(scratch.path("made.qcow2")).unwrap();
    let registry = vdkit::registry();
    let path = scratch.path("changed.qcow2");
    let mut rng = Rng::from_env(7);
    let began = Instant::now();
    for _ in 0..400 {
        let mut bytes = made.clone();
        // Tables are in the first clusters.
        for _ in 0..=rng.below(6) {
            let at = rng.below(6 * 4096) as usize;
            bytes[at] = rng.next_u64() as u8;
        }
        if rng.chance(1, 8) {
            bytes.truncate(rng.below(made.len() as u64) as usize);
        }
        std::fs::write(&path, &bytes).unwrap();
        let options = vdkit::jobs::DoctorOptions::default();
        let monitor = vdkit::Monitor::default();
        // Whatever it says, it says it; the seed is in the message of a panic.
        let report = vdkit::jobs::doctor(&registry, &path, &options, &monitor);
        assert!(report.is_ok_and(|report| report.images.len() == 1), "seed {}", rng.seed());
    }
    assert!(began.elapsed() < Duration::from_secs(300));
    // More metadata than is read: it is said, not done.
    let options = "cluster_size=4K,preallocation=metadata";
    scratch.ok(&["create", "much.qcow2", "40G", "-o", options]);
    let found = codes(&scratch, 0, &["much.qcow2"]);
    assert!(found.contains(&"not-checked".to_owned()), "{found:?}");
    assert!(!found.contains(&"unused-space".to_owned()), "{found:?}");
    // A pipe is no image, and nobody waits for its other end.
    let fifo = scratch.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert_eq!(codes(&scratch, 4, &["fifo"]), ["unreadable"]);
}

/// The limit of what is read holds for all files of an image together.
#[test]
fn extents_have_no_limit_of_their_own() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.vmdk", "8G", "-o", "subformat=twoGbMaxExtentSparse"]);
    assert!(!codes(&scratch, 0, &["disk.vmdk"]).contains(&"not-checked".to_owned()));
    for extent in scratch.names().iter().filter(|name| name.starts_with("disk-s")) {
        // Capacity, and both grain directories: empty ones of 8 MiB each, in a hole of the file.
        for (at, value) in [(12, 1u64 << 37), (48, 1 << 21), (56, 5 << 19)] {
            patch(&scratch, extent, at, |bytes| *bytes = value.to_le_bytes());
        }
        let file = File::options().write(true).open(scratch.path(extent)).unwrap();
        file.set_len(2 << 30).unwrap();
    }
    let report = scratch.run(&["doctor", "--json", "disk.vmdk"]).stdout;
    assert!(report.contains("not-checked"), "{report}");
}

#[test]
fn every_code_is_documented() {
    let page =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/commands/doctor.md");
    let page = std::fs::read_to_string(page).unwrap();
    for code in DoctorCode::ALL {
        let severity = format!("{:?}", code.severity()).to_lowercase();
        let row = format!("| `{}` | {severity} | {} |\n", code.name(), code.meaning());
        assert!(page.contains(&row), "{row}");
    }
}
