//! `vdkit convert` and `vdkit info` of appliances (OVA), and new ones.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use crate::common::{self, Scratch, peer};
use vdkit_testkit::Rng;
use vdkit_testkit::appliance::{ovf, tar};
use vdkit_testkit::http::{HttpFaults, HttpServer};

const MIB: usize = 1 << 20;

/// A disk with random data, text and zeroes.
fn disk(seed: u64, bytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut disk = vec![0; bytes];
    for (index, piece) in disk.chunks_mut(200_000).enumerate() {
        match index % 3 {
            0 => rng.fill(piece),
            1 => piece.fill(b'a' + seed as u8 + (index % 9) as u8),
            _ => {}
        }
    }
    disk
}

fn python(scratch: &Scratch, program: &str) -> String {
    let output = peer(&scratch.path(""), "python3", &["-c", program]);
    String::from_utf8(output.stdout).unwrap()
}

/// A stream-optimized VMDK of a raw disk, by QEMU.
fn vmdk(scratch: &Scratch, raw: &str, name: &str) {
    let options = ["-O", "vmdk", "-o", "subformat=streamOptimized", raw, name];
    peer(&scratch.path(""), "qemu-img", &[&["convert"][..], &options].concat());
}

/// A folder `parts` with an appliance of two disks, one.raw and two.raw, unpacked.
fn parts(scratch: &Scratch) {
    std::fs::create_dir(scratch.path("parts")).unwrap();
    scratch.write("one.raw", &disk(1, 3 * MIB));
    scratch.write("two.raw", &disk(2, 2 * MIB + 512));
    vmdk(scratch, "one.raw", "parts/one.vmdk");
    vmdk(scratch, "two.raw", "parts/two.vmdk");
    let capacity = "ovf:format=\"http://www.vmware.com/x/vmdk.html#streamOptimized\"";
    let text = ovf(&[("ovf:href=\"one.vmdk\"", capacity), ("ovf:href=\"two.vmdk\"", capacity)]);
    scratch.write("parts/a.ovf", text.as_bytes());
    manifest(scratch, "sha256");
}

fn manifest(scratch: &Scratch, method: &str) {
    python(
        scratch,
        &format!(
            "import hashlib\nwith open('parts/a.mf', 'w') as out:\n for name in ['a.ovf', 'one.vmdk', \
             'two.vmdk']:\n  data = open('parts/' + name, 'rb').read()\n  out.write('{}(%s)= %s\\n' % \
             (name, hashlib.{method}(data).hexdigest()))",
            method.to_uppercase()
        ),
    );
}

/// Packs the parts by GNU tar.
fn packed(scratch: &Scratch, name: &str, format: &str, files: &[&str]) {
    let (target, folder) = (scratch.path(name), scratch.path("parts"));
    let mut all = vec!["--format", format, "-cf", target.to_str().unwrap()];
    all.extend(files);
    peer(&folder, "tar", &all);
}

const ALL: [&str; 4] = ["a.ovf", "a.mf", "one.vmdk", "two.vmdk"];

/// Converts an appliance of the parts into a folder, and compares.
fn unpacks(scratch: &Scratch, source: &str) {
    let _ = std::fs::remove_dir_all(scratch.path("out"));
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.ok(&["convert", source, "out"]);
    scratch.same("one.raw", "out/one.qcow2");
    scratch.same("two.raw", "out/two.qcow2");
    assert_eq!(listed(&scratch.path("out")), ["one.qcow2", "two.qcow2"]);
}

fn listed(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_new_appliance_holds_its_disks_as_others_read_it() {
    let scratch = Scratch::new();
    scratch.write("one.raw", &disk(1, 3 * MIB));
    scratch.write("two.raw", &disk(2, 5 * MIB + 512));
    peer(&scratch.path(""), "qemu-img", &["convert", "-O", "qcow2", "two.raw", "two.qcow2"]);
    let options = ["-o", "cpus=4,memory=8G,name=My <VM>", "--verify"];
    let sources = ["one.raw", "two.qcow2", "my vm.ova"];
    let report = scratch.json_of("convert", 0, &[&options[..], &sources].concat());
    assert_eq!(report["manifest"], "written");
    assert_eq!(report["disks"][1]["verified"], 5 * MIB + 512);
    // The order that DSP0243 asks for.
    let list = peer(&scratch.path(""), "tar", &["tf", "my vm.ova"]).stdout;
    let names = ["my_vm.ovf", "my_vm.mf", "my_vm-disk1.vmdk", "my_vm-disk2.vmdk"];
    assert_eq!(String::from_utf8(list).unwrap().lines().collect::<Vec<_>>(), names);
    std::fs::create_dir(scratch.path("x")).unwrap();
    peer(&scratch.path("x"), "tar", &["xf", "../my vm.ova"]);
    scratch.same("one.raw", "x/my_vm-disk1.vmdk");
    scratch.same("two.raw", "x/my_vm-disk2.vmdk");
    scratch.ok(&["check", "x/my_vm-disk2.vmdk"]);
    // The manifest and the descriptor as another program reads them.
    let checked = python(
        &scratch,
        "import hashlib, re, tarfile, xml.etree.ElementTree as tree\n\
         files = {m.name: tarfile.open('my vm.ova').extractfile(m).read() \
         for m in tarfile.open('my vm.ova')}\n\
         lines = files['my_vm.mf'].decode().splitlines()\n\
         for line in lines:\n \
          name, digest = re.fullmatch(r'SHA256\\((.*)\\)= ([0-9a-f]{64})', line).groups()\n \
          assert hashlib.sha256(files[name]).hexdigest() == digest, name\n\
         root = tree.fromstring(files['my_vm.ovf'])\n\
         ns = '{http://schemas.dmtf.org/ovf/envelope/1}'\n\
         sizes = {f.get(ns + 'href'): int(f.get(ns + 'size')) for f in root.iter(ns + 'File')}\n\
         assert all(len(files[name]) == size for name, size in sizes.items()), sizes\n\
         print(len(lines), [d.get(ns + 'capacity') for d in root.iter(ns + 'Disk')], \
         root.find(ns + 'VirtualSystem/' + ns + 'Name').text)",
    );
    let sizes = format!("3 ['{}', '{}'] My <VM>\n", 3 * MIB, 5 * MIB + 512);
    assert_eq!(checked, sizes);
    // And back.
    let info = scratch.json_of("info", 0, &["my vm.ova"]);
    assert_eq!((&info["name"], &info["format"]), (&"My <VM>".into(), &"ova".into()));
    assert_eq!(info["disks"][1]["virtual-size"], 5 * MIB + 512);
    assert!(scratch.ok(&["info", "my vm.ova"]).stdout.contains("my_vm-disk2.vmdk"));
    std::fs::create_dir(scratch.path("out")).unwrap();
    let report = scratch.json_of("convert", 0, &["-O", "raw", "my vm.ova", "out"]);
    assert_eq!(report["manifest"], "verified");
    scratch.same("one.raw", "out/my_vm-disk1.raw");
    scratch.same("two.raw", "out/my_vm-disk2.raw");
    // By its format's name, from an ending that says nothing.
    scratch.ok(&["convert", "-O", "ova", "one.raw", "two.qcow2", "again"]);
    std::fs::rename(scratch.path("again"), scratch.path("again.ova")).unwrap();
    // An appliance of an appliance's disks.
    scratch.ok(&["convert", "again.ova", "one.raw", "three.ova", "--threads", "1"]);
    scratch.ok(&["convert", "three.ova", "--disk", "vmdisk2", "two.again.raw"]);
    scratch.same("two.raw", "two.again.raw");
    let three = scratch.json_of("info", 0, &["three.ova"]);
    assert_eq!(three["disks"].as_array().unwrap().len(), 3);
}

#[test]
fn appliances_of_other_writers_are_read() {
    let scratch = Scratch::new();
    parts(&scratch);
    for format in ["ustar", "gnu", "posix", "v7"] {
        packed(&scratch, "a.ova", format, &ALL);
        unpacks(&scratch, "a.ova");
    }
    manifest(&scratch, "sha1");
    for format in ["USTAR_FORMAT", "GNU_FORMAT", "PAX_FORMAT"] {
        python(
            &scratch,
            &format!(
                "import tarfile\nout = tarfile.open('b.ova', 'w', format=tarfile.{format})\n\
                 for name in ['a.ovf', 'one.vmdk', 'two.vmdk', 'a.mf']:\n \
                 out.add('parts/' + name, './' + name)\nout.close()"
            ),
        );
        unpacks(&scratch, "b.ova");
    }
    // Named otherwise, and told by what it holds.
    std::fs::rename(scratch.path("b.ova"), scratch.path("b.img")).unwrap();
    unpacks(&scratch, "b.img");
    // With the descriptor behind the disks it is told by its name.
    packed(&scratch, "c.ova", "gnu", &["one.vmdk", "two.vmdk", "a.mf", "a.ovf"]);
    unpacks(&scratch, "c.ova");
    std::fs::rename(scratch.path("c.ova"), scratch.path("c.img")).unwrap();
    scratch.ok(&["convert", "-f", "ova", "--disk", "two.vmdk", "c.img", "c.raw"]);
    scratch.same("two.raw", "c.raw");
    // And its own bytes when that is asked for.
    scratch.ok(&["convert", "-f", "raw", "b.img", "plain.raw"]);
    let bytes = |name: &str| std::fs::read(scratch.path(name)).unwrap();
    assert!(bytes("plain.raw").starts_with(&bytes("b.img")));
}

#[test]
fn long_names_and_files_beyond_8_gib_are_passed_over() {
    let scratch = Scratch::new();
    parts(&scratch);
    for format in ["GNU_FORMAT", "PAX_FORMAT"] {
        // An ISO of 9 GiB, all hole, between the descriptor and the disks.
        python(
            &scratch,
            &format!(
                "import tarfile, shutil\nout = open('a.ova', 'wb')\n\
                 def add(name, size, data):\n \
                  info = tarfile.TarInfo(name); info.size = size\n \
                  out.write(info.tobuf(tarfile.{format}))\n \
                  out.write(data) if data else out.seek(size, 1)\n \
                  out.seek(-out.tell() % 512, 1)\n\
                 names = ['a.ovf', 'one.vmdk', 'two.vmdk']\n\
                 files = {{n: open('parts/' + n, 'rb').read() for n in names}}\n\
                 add('a.ovf', len(files['a.ovf']), files['a.ovf'])\n\
                 add('x' * 150 + '.iso', 9 << 30, None)\n\
                 for n in names[1:]: add(n, len(files[n]), files[n])\n\
                 out.truncate(out.tell() + 1024)"
            ),
        );
        unpacks(&scratch, "a.ova");
        let info = scratch.json_of("info", 0, &["a.ova"]);
        assert_eq!(info["manifest"], serde_json::Value::Null);
    }
}

#[test]
fn a_wrong_hash_leaves_nothing_behind() {
    let scratch = Scratch::new();
    parts(&scratch);
    let whole = std::fs::read(scratch.path("parts/two.vmdk")).unwrap();
    // One bit of the last grain's data: the image stays readable.
    let mut wrong = whole.clone();
    let at = wrong.len() / 2;
    wrong[at] ^= 1;
    scratch.write("parts/two.vmdk", &wrong);
    packed(&scratch, "a.ova", "gnu", &ALL);
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.write("old.raw", &vec![5; 3 * MIB]);
    scratch.write("out/one.qcow2", b"what was there");
    let names = scratch.names();
    for target in ["out", "null:"] {
        scratch.fails(4, "a.ova:two.vmdk: file", &["convert", "a.ova", target]);
    }
    let second = ["--disk", "2", "a.ova"];
    for target in ["new.qcow2", "old.raw"] {
        scratch.fails(4, "sha256:", &[&["convert"][..], &second, &[target]].concat());
    }
    // Written into something that is there: hashed before.
    let into = ["old.raw", "--into", "-O", "raw"];
    scratch.fails(4, "as the manifest says", &[&["convert"][..], &second, &into].concat());
    let pipe = scratch.run(&[&["convert", "-O", "raw"][..], &second, &["-"]].concat());
    assert_eq!((pipe.code, pipe.bytes.len()), (Some(4), 0));
    assert_eq!(scratch.names(), names);
    assert_eq!(listed(&scratch.path("out")), ["one.qcow2"]);
    assert_eq!(std::fs::read(scratch.path("out/one.qcow2")).unwrap(), b"what was there");
    assert_eq!(std::fs::read(scratch.path("old.raw")).unwrap(), vec![5; 3 * MIB]);
    // The other disk is right.
    scratch.ok(&["convert", "--disk", "one.vmdk", "a.ova", "new.raw"]);
    scratch.same("one.raw", "new.raw");
    // A descriptor that was changed is not even listed.
    scratch.write("parts/two.vmdk", &whole);
    let text = std::fs::read_to_string(scratch.path("parts/a.ovf")).unwrap();
    scratch.write("parts/a.ovf", text.replace("d2", "d3").as_bytes());
    packed(&scratch, "b.ova", "gnu", &ALL);
    scratch.fails(4, "b.ova:a.ovf: file", &["info", "b.ova"]);
    scratch.fails(4, "b.ova:a.ovf: file", &["convert", "b.ova", "out"]);
}

#[test]
fn what_cannot_be_verified_is_said() {
    let scratch = Scratch::new();
    parts(&scratch);
    scratch.write("parts/a.cert", b"not a certificate");
    packed(&scratch, "a.ova", "gnu", &["a.ovf", "one.vmdk", "two.vmdk"]);
    let answer = scratch.ok(&["convert", "a.ova", "null:"]);
    assert!(answer.stderr.contains("has no manifest"), "{answer:?}");
    packed(&scratch, "b.ova", "gnu", &["a.ovf", "a.mf", "a.cert", "one.vmdk", "two.vmdk"]);
    let answer = scratch.ok(&["convert", "b.ova", "null:"]);
    assert!(answer.stderr.contains("'a.cert' is not verified"), "{answer:?}");
    assert!(!answer.stderr.contains("no manifest"), "{answer:?}");
    let report = scratch.json_of("convert", 0, &["b.ova", "null:"]);
    assert_eq!(
        (&report["manifest"], &report["certificate"]),
        (&"verified".into(), &"a.cert".into())
    );
}

#[test]
fn a_disk_is_chosen_or_a_folder_named() {
    let scratch = Scratch::new();
    parts(&scratch);
    packed(&scratch, "a.ova", "gnu", &ALL);
    scratch.fails(2, "has 2 disks, and one target", &["convert", "a.ova", "x.qcow2"]);
    scratch.fails(2, "'3' is not one of its disks", &["convert", "a.ova", "x", "--disk", "3"]);
    scratch.fails(2, "no such folder", &["convert", "a.ova", "x/", "--disk", "1"]);
    scratch.fails(2, "is an appliance", &["convert", "a.ova", "one.raw", "x.raw"]);
    scratch.fails(2, "is none", &["convert", "one.raw", "x.raw", "--disk", "1"]);
    scratch.fails(2, "--parent", &["convert", "a.ova", "x", "--disk", "1", "--parent", "one.raw"]);
    scratch.fails(2, "into a file", &["convert", "one.raw", "-O", "ova", "-"]);
    scratch.fails(2, "into a file", &["convert", "one.raw", "-O", "ova", "null:"]);
    scratch.fails(2, "--backing", &["convert", "one.raw", "x.ova", "-B", "two.raw"]);
    scratch.fails(
        2,
        "azure takes no appliances",
        &["convert", "one.raw", "x.ova", "--for", "azure"],
    );
    scratch.fails(2, "zlib", &["convert", "one.raw", "x.ova", "--compress=zstd"]);
    scratch.fails(
        2,
        "unknown option 'cluster_size'",
        &["convert", "one.raw", "x.ova", "-o", "cluster_size=4K"],
    );
    scratch.fails(1, "asks for an appliance", &["create", "x.ova", "1M"]);
    assert!(!scratch.names().iter().any(|name| name.starts_with('x')), "{:?}", scratch.names());
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.ok(&["convert", "a.ova", "out", "--disk", "2", "-O", "vpc"]);
    assert_eq!(listed(&scratch.path("out")), ["two.vhd"]);
    scratch.ok(&["convert", "a.ova", "out", "--for", "hyperv"]);
    assert_eq!(listed(&scratch.path("out")), ["one.vhdx", "two.vhd", "two.vhdx"]);
    for preset in ["vmware", "virtualbox", "aws"] {
        scratch.ok(&["convert", "one.raw", "x.ova", "--for", preset, "--compress=zlib:9"]);
        scratch.ok(&["convert", "x.ova", "x.raw"]);
        scratch.same("one.raw", "x.raw");
    }
}

/// A guest that had an appliance for its disk would see a tar file.
#[test]
fn an_appliance_is_no_disk() {
    let scratch = Scratch::new();
    parts(&scratch);
    packed(&scratch, "a.ova", "gnu", &ALL);
    // One that is known by its first file, and one by its name.
    std::fs::copy(scratch.path("a.ova"), scratch.path("machine")).unwrap();
    packed(&scratch, "b.ova", "ustar", &["one.vmdk", "a.ovf", "two.vmdk"]);
    for image in ["a.ova", "machine", "b.ova"] {
        for command in [
            &["serve", image, "--nbd", "unix:s"][..],
            &["map", image],
            &["read", image, "0", "16"],
            &["write", image, "0", "512", "--pattern", "1"],
            &["compare", image, "one.raw"],
            &["resize", image, "+1M"],
            &["validate", "--for", "gcp", image],
        ] {
            let answer = scratch.fails(1, "is an appliance (OVA)", command);
            let text = format!("convert {image} FOLDER/");
            assert!(answer.stderr.contains(&text), "{command:?}: {}", answer.stderr);
        }
        scratch.fails(8, "is an appliance (OVA)", &["check", image]);
    }
    // Its disks are listed all the same, and who wants the bytes of the tar file gets them.
    scratch.ok(&["info", "a.ova"]);
    scratch.ok(&["map", "-f", "raw", "a.ova"]);
    scratch.ok(&["check", "-f", "raw", "a.ova"]);
    let bytes = scratch.ok(&["read", "-f", "raw", "a.ova", "0", "5"]);
    assert_eq!(bytes.stdout, "a.ovf");
    // Other tar files are what they were: anything may be a disk.
    packed(&scratch, "plain.tar", "gnu", &["one.vmdk", "a.ovf"]);
    scratch.ok(&["map", "plain.tar"]);
}

#[test]
fn names_of_strangers_stay_in_the_folder() {
    let scratch = Scratch::new();
    scratch.write("one.raw", &disk(1, MIB));
    vmdk(&scratch, "one.raw", "one.vmdk");
    let bytes = std::fs::read(scratch.path("one.vmdk")).unwrap();
    let names = ["../up.vmdk", "/tmp/vdkit-absolute.vmdk", "a/b.vmdk", "..", "a\u{7}b.vmdk", "a"];
    let escaped: Vec<String> =
        names.iter().map(|name| format!("ovf:href=\"{}\"", name.replace('\u{7}', "?"))).collect();
    let disks: Vec<(&str, &str)> = escaped.iter().map(|file| (file.as_str(), "")).collect();
    let text = ovf(&disks);
    let mut files: Vec<(&str, &[u8])> = vec![("a.ovf", text.as_bytes())];
    let shown: Vec<String> = names.iter().map(|name| name.replace('\u{7}', "?")).collect();
    files.extend(shown.iter().map(|name| (name.as_str(), &bytes[..])));
    scratch.write("a.ova", &tar(&files));
    std::fs::create_dir(scratch.path("out")).unwrap();
    scratch.ok(&["convert", "a.ova", "out"]);
    let made = listed(&scratch.path("out"));
    assert_eq!(made, ["a.qcow2", "d1.qcow2", "d2.qcow2", "d3.qcow2", "d4.qcow2", "d5.qcow2"]);
    assert_eq!(scratch.names(), ["a.ova", "one.raw", "one.vmdk", "out"]);
    assert!(!Path::new("/tmp/vdkit-absolute.qcow2").exists());
    made.iter().for_each(|name| scratch.same("one.raw", &format!("out/{name}")));
    // Two files of one name, of which only one can be the right one.
    let twice: [(&str, &[u8]); 3] = [
        ("a.ovf", ovf(&[("ovf:href=\"a\"", "")]).leak().as_bytes()),
        ("a", &bytes),
        ("./a", &bytes),
    ];
    scratch.write("b.ova", &tar(&twice));
    scratch.fails(4, "two files called 'a'", &["convert", "b.ova", "b.raw"]);
    // A disk that names files outside is held to the policy: there is no folder of its own.
    let flat = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                createType=\"monolithicFlat\"\nRW 2048 FLAT \"one.raw\" 0\n";
    let text = ovf(&[("ovf:href=\"a.vmdk\"", "ovf:format=\"vmdk\"")]);
    let files: [(&str, &[u8]); 2] = [("a.ovf", text.as_bytes()), ("a.vmdk", flat.as_bytes())];
    scratch.write("c.ova", &tar(&files));
    scratch.fails(5, "one.raw", &["convert", "c.ova", "c.raw"]);
}

#[test]
fn a_truncated_appliance_is_refused_wherever_it_ends() {
    let scratch = Scratch::new();
    parts(&scratch);
    packed(&scratch, "a.ova", "ustar", &ALL);
    let whole = std::fs::read(scratch.path("a.ova")).unwrap();
    std::fs::create_dir(scratch.path("out")).unwrap();
    let last = std::fs::metadata(scratch.path("parts/two.vmdk")).unwrap().len() as usize;
    let end = whole.iter().rposition(|&byte| byte != 0).unwrap();
    for cut in [1000, 2600, whole.len() / 2, end - last / 2, end - 600] {
        scratch.write("cut.ova", &whole[..cut]);
        let answer = scratch.run(&["convert", "cut.ova", "out"]);
        assert_eq!(answer.code, Some(4), "{cut}: {answer:?}");
        assert!(listed(&scratch.path("out")).is_empty(), "{cut}");
    }
}

#[test]
fn disks_in_pieces_and_in_gzip() {
    let scratch = Scratch::new();
    parts(&scratch);
    let dir = scratch.path("parts");
    peer(&dir, "gzip", &["-k", "two.vmdk"]);
    let split = ["-b", "1000000", "-d", "-a", "9", "one.vmdk", "one.vmdk."];
    peer(&dir, "split", &split);
    let two = std::fs::metadata(dir.join("two.vmdk.gz")).unwrap().len();
    let second = format!("ovf:href=\"two.vmdk.gz\" ovf:compression=\"gzip\" ovf:size=\"{two}\"");
    let text = ovf(&[
        ("ovf:href=\"one.vmdk\" ovf:chunkSize=\"1000000\"", "ovf:capacity=\"3145728\""),
        (&second, "ovf:capacity=\"4097\" ovf:capacityAllocationUnits=\"byte * 512\""),
    ]);
    scratch.write("parts/a.ovf", text.as_bytes());
    let pieces: Vec<_> =
        listed(&dir).into_iter().filter(|name| name.starts_with("one.vmdk.0")).collect();
    assert!(pieces.len() >= 2, "{pieces:?}");
    let mut files = vec!["a.ovf", "two.vmdk.gz"];
    files.extend(pieces.iter().map(String::as_str));
    packed(&scratch, "a.ova", "gnu", &files);
    unpacks(&scratch, "a.ova");
    let info = scratch.json_of("info", 0, &["a.ova"]);
    assert_eq!(info["disks"][0]["pieces"], pieces.len());
    assert_eq!(info["disks"][1]["compression"], "gzip");
    // What the descriptor calls gzip and is not, and what it calls small and is not.
    let wrong =
        second.replace("two.vmdk.gz", "one.vmdk").replace(&format!(" ovf:size=\"{two}\""), "");
    scratch.write("parts/a.ovf", ovf(&[(&wrong, "")]).as_bytes());
    packed(&scratch, "b.ova", "gnu", &["a.ovf", "one.vmdk"]);
    scratch.fails(4, "gzip, as the descriptor says", &["convert", "b.ova", "b.raw"]);
}

/// The descriptor's capacity is what bounds it, and where there is none nothing does.
#[test]
fn a_packed_disk_unpacks_to_no_more_than_its_capacity_and_to_nothing_without_one() {
    let scratch = Scratch::new();
    let dir = scratch.path("parts");
    std::fs::create_dir(&dir).unwrap();
    let zeroes = std::fs::File::create(dir.join("bomb")).unwrap();
    zeroes.set_len(200 << 20).unwrap();
    peer(&dir, "gzip", &["bomb"]);
    let bomb = "ovf:href=\"bomb.gz\" ovf:compression=\"gzip\"";
    scratch.write("parts/a.ovf", ovf(&[(bomb, "ovf:capacity=\"512\"")]).as_bytes());
    packed(&scratch, "c.ova", "gnu", &["a.ovf", "bomb.gz"]);
    scratch.fails(1, "far more than the capacity", &["convert", "c.ova", "c.raw"]);
    assert!(!scratch.names().iter().any(|name| name.ends_with("c.raw")));
    scratch.write("parts/a.ovf", ovf(&[(bomb, "ovf:capacity=\"${size}\"")]).as_bytes());
    packed(&scratch, "d.ova", "gnu", &["a.ovf", "bomb.gz"]);
    scratch.fails(1, "no capacity", &["convert", "d.ova", "d.raw"]);
}

#[test]
fn an_appliance_comes_through_pipes_and_over_http() {
    let scratch = Scratch::new();
    parts(&scratch);
    packed(&scratch, "a.ova", "gnu", &ALL);
    let bytes = std::fs::read(scratch.path("a.ova")).unwrap();
    std::fs::create_dir(scratch.path("out")).unwrap();
    let mut child =
        scratch.command(&["convert", "-", "out"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert!(child.wait().unwrap().success());
    scratch.same("two.raw", "out/two.qcow2");
    peer(&scratch.path(""), "gzip", &["-k", "a.ova"]);
    unpacks(&scratch, "a.ova.gz");
    let server = HttpServer::start(bytes.clone(), HttpFaults::default());
    // In place: a spool would fail.
    let mut command = scratch.command(&["convert", server.url(), "out", "-O", "raw"]);
    assert!(command.env("TMPDIR", "/nowhere").status().unwrap().success());
    scratch.same("one.raw", "out/one.raw");
    scratch.same("two.raw", "out/two.raw");
    let no_ranges = HttpFaults { no_ranges: true, ..HttpFaults::default() };
    let server = HttpServer::start(bytes, no_ranges);
    unpacks(&scratch, server.url());
}

#[test]
fn an_interrupted_appliance_leaves_nothing() {
    let scratch = Scratch::new();
    parts(&scratch);
    packed(&scratch, "a.ova", "gnu", &ALL);
    std::fs::create_dir(scratch.path("out")).unwrap();
    for arguments in [
        &["convert", "--rate", "100K", "a.ova", "out"][..],
        &["convert", "--rate", "100K", "one.raw", "two.raw", "new.ova"],
    ] {
        let names = scratch.names();
        let mut child = scratch.command(arguments).stderr(Stdio::null()).spawn().unwrap();
        common::wait_until_signals_are_handled(child.id());
        let begun = || {
            let all = listed(&scratch.path("out")).into_iter().chain(scratch.names());
            all.into_iter().any(|name| name.ends_with(".partial"))
        };
        common::wait_until(begun);
        common::signal(child.id(), "TERM");
        assert_eq!(child.wait().unwrap().code(), Some(130), "{arguments:?}");
        assert_eq!(scratch.names(), names);
        assert!(listed(&scratch.path("out")).is_empty());
    }
}

#[test]
fn empty_disks_are_named_and_left_out() {
    let scratch = Scratch::new();
    let text = "<Envelope><DiskSection><Disk diskId=\"scratch\" capacity=\"4\" \
                capacityAllocationUnits=\"byte * 2^30\"/></DiskSection></Envelope>";
    scratch.write("a.ova", &tar(&[("a.ovf", text.as_bytes())]));
    let info = scratch.json_of("info", 0, &["a.ova"]);
    assert_eq!(info["disks"][0]["capacity"], 4u64 << 30);
    std::fs::create_dir(scratch.path("out")).unwrap();
    let answer = scratch.ok(&["convert", "a.ova", "out"]);
    assert!(answer.stderr.contains("'vdkit create FILE 4294967296'"), "{answer:?}");
    let error = ["convert", "a.ova", "--disk", "scratch", "x.raw"];
    let answer = scratch.run(&error);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    assert!(listed(&scratch.path("out")).is_empty());
}
