use std::io::Write;
use std::time::Duration;

use vdkit_block::Options;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::appliance::tar;
use vdkit_testkit::processor_time;

use super::*;
use crate::machine::{Machine, OPTIONS};
use crate::writer::{NewDisk, PackageWriter};

fn open(bytes: &[u8]) -> Result<Package> {
    let storage = Arc::new(MemoryStorage::from_bytes("a.ova", bytes));
    Package::open(storage, &PackageLimits::default())
}

fn fails(bytes: &[u8], words: &str) {
    let error = open(bytes).unwrap_err().to_string();
    assert!(error.contains(words), "{error}");
}

/// A descriptor of one disk in one file.
fn ovf(file: &str, disk: &str) -> Vec<u8> {
    let file = format!("<File id='f' {file}/>");
    let disk = format!("<Disk diskId='d' fileRef='f' {disk}/>");
    format!("<Envelope><References>{file}</References><DiskSection>{disk}</DiskSection></Envelope>")
        .into_bytes()
}

fn sha256(bytes: &[u8]) -> String {
    let mut hasher = Hasher::new(vdkit_stream::HashMethod::Sha256);
    hasher.update(bytes);
    hex(&hasher.finish())
}

fn check(package: &Package) -> Result<()> {
    let all = 0..package.disks().len();
    all.into_iter().try_for_each(|disk| package.verify(disk, &CancelToken::default(), &mut |_| {}))
}

fn bytes_of(package: &Package, index: usize) -> Vec<u8> {
    let storage = package.storage_of(index).unwrap();
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut bytes, HostOffset(0)).unwrap();
    bytes
}

#[test]
fn what_is_written_is_read() {
    let memory = Arc::new(MemoryStorage::new("a.ova"));
    let options = Options::parse("ova", OPTIONS, ["manifest=sha1"]).unwrap();
    let machine = Machine::new(&options, "My machine").unwrap();
    let disk = |n: u64| NewDisk { file: format!("m-disk{n}.vmdk"), capacity: n << 20 };
    let disks = vec![disk(1), disk(2), disk(3)];
    let mut writer = PackageWriter::new(memory.clone(), machine, disks, "m", 1 << 30).unwrap();
    let contents = [vec![1; 1000], Vec::new(), vec![3; 512]];
    for content in &contents {
        let mut sink = writer.next_sink().unwrap();
        for piece in content.chunks(300) {
            sink.write_all(piece).unwrap();
        }
        writer.end_disk(&sink, 7).unwrap();
    }
    assert!(writer.next_sink().is_none());
    let written = writer.finish().unwrap();
    assert_eq!(memory.len().unwrap() % 10240, 0);
    let package = Package::open(memory.clone(), &PackageLimits::default()).unwrap();
    assert_eq!(package.descriptor().system.as_deref(), Some("My machine"));
    assert_eq!(package.descriptor_name(), "m.ovf");
    assert_eq!(package.manifest().unwrap().0, "m.mf");
    assert_eq!(package.manifest().unwrap().1.entries().len(), 4);
    check(&package).unwrap();
    for (index, content) in contents.iter().enumerate() {
        let found = &package.disks()[index];
        assert_eq!(found.disk.capacity, Some((index as u64 + 1) << 20));
        assert_eq!(found.file_bytes(), content.len() as u64);
        assert_eq!(written[index].file_bytes, content.len() as u64);
        assert_eq!(&bytes_of(&package, index), content);
    }
    // Each byte of the disks is verified.
    for (index, content) in contents.iter().enumerate().filter(|(_, content)| !content.is_empty()) {
        let member = &package.disks()[index].members[0];
        for at in [0, content.len() as u64 - 1] {
            let changed = Arc::new(MemoryStorage::clone(&memory));
            changed.write_at(&[99], HostOffset(member.offset + at)).unwrap();
            let package = Package::open(changed, &PackageLimits::default()).unwrap();
            let error = check(&package).unwrap_err().to_string();
            assert!(error.contains(&member.name) && error.contains("sha1:"), "{error}");
        }
    }
}

#[test]
fn names_of_new_files_are_checked() {
    let begin = |stem: &str, files: &[&str]| {
        let machine = Machine::new(&Options::default(), "m").unwrap();
        let disk = |file: &&str| NewDisk { file: (*file).to_owned(), capacity: 512 };
        let storage = Arc::new(MemoryStorage::new("a.ova"));
        PackageWriter::new(storage, machine, files.iter().map(disk).collect(), stem, 0)
    };
    assert!(begin("m", &["a.vmdk", "b.vmdk"]).is_ok());
    assert!(begin("m", &[]).is_err());
    for bad in ["", "a/b", "../a", "m.mf", &"x".repeat(100)] {
        assert!(begin("m", &[bad]).is_err(), "{bad}");
    }
    assert!(begin("a/b", &["x"]).is_err());
    assert!(begin("m", &["a", "a"]).is_err());
}

#[test]
fn hashes_are_checked_of_everything_that_is_used() {
    let text = ovf("href='d.vmdk'", "");
    let (good, bad) = (sha256(&text), sha256(b"other"));
    let line = |name: &str, hash: &str| format!("SHA256({name})= {hash}\n");
    let disk = sha256(b"disk");
    let pack = |manifest: &str| {
        tar(&[("a.ovf", &text), ("d.vmdk", b"disk"), ("a.mf", manifest.as_bytes())])
    };
    let both = line("a.ovf", &good) + &line("d.vmdk", &disk);
    let package = open(&pack(&both)).unwrap();
    check(&package).unwrap();
    fails(&pack(&(line("a.ovf", &bad) + &line("d.vmdk", &disk))), "a.ova:a.ovf: file");
    fails(&pack(&line("d.vmdk", &disk)), "a.ova:a.ovf: manifest");
    fails(&pack(&(both.clone() + &line("gone.iso", &bad))), "no file 'gone.iso'");
    // If a file has two lines, both must match.
    let twice = both.clone() + &line("d.vmdk", &bad);
    assert!(check(&open(&pack(&twice)).unwrap()).is_err());
    // The disk's hash is checked when it is read.
    let unlisted = open(&pack(&line("a.ovf", &good))).unwrap();
    let error = check(&unlisted).unwrap_err().to_string();
    assert!(error.contains("a.ova:d.vmdk: manifest"), "{error}");
    // Cancellation works.
    let stopped = CancelToken::default();
    stopped.cancel();
    assert!(matches!(package.verify(0, &stopped, &mut |_| {}), Err(Error::Interrupted)));
    let lines = line("a.ovf", &good) + &line("d.vmdk", &sha256(b""));
    let empty = tar(&[("a.ovf", &text), ("d.vmdk", b""), ("a.mf", lines.as_bytes())]);
    let verified = open(&empty).unwrap().verify(0, &stopped, &mut |_| {});
    assert!(matches!(verified, Err(Error::Interrupted)), "{verified:?}");
    // Without a manifest nothing can be verified.
    let without = open(&tar(&[("a.ovf", &text), ("d.vmdk", b"disk"), ("a.cert", b"x")])).unwrap();
    assert!(without.manifest().is_none());
    assert_eq!(without.certificate(), Some("a.cert"));
    check(&without).unwrap();
}

#[test]
fn files_that_are_missing_twice_or_of_another_size_are_refused() {
    let text = ovf("href='d.vmdk' size='4'", "");
    assert!(open(&tar(&[("a.ovf", &text), ("d.vmdk", b"disk")])).is_ok());
    fails(&tar(&[("a.ovf", &text)]), "no file 'd.vmdk'");
    fails(&tar(&[("a.ovf", &text), ("d.vmdk", b"disks")]), "5 bytes of 'd.vmdk'");
    let twice: [(&str, &[u8]); 3] = [("a.ovf", &text), ("d.vmdk", b"disk"), ("./d.vmdk", b"evil")];
    fails(&tar(&twice), "two files called 'd.vmdk'");
    fails(&tar(&[("a.ovf", &text), ("b.OVF", &text)]), "second descriptor 'b.OVF'");
    fails(&tar(&[("d.vmdk", b"disk")]), "a file that ends in .ovf");
    let large = vec![b' '; (4 << 20) + 1];
    fails(&tar(&[("a.ovf", &large)]), "size of the OVF descriptor");
    fails(&tar(&[("a.ovf", &text), ("d.vmdk", b"disk"), ("a.mf", &large)]), "manifest");
}

#[test]
fn pieces_and_compressions() {
    let text = ovf("href='d.vmdk' chunkSize='3' size='8'", "");
    let pieces: [(&str, &[u8]); 3] =
        [("d.vmdk.000000000", b"abc"), ("d.vmdk.000000001", b"def"), ("d.vmdk.000000002", b"gh")];
    let pack = |pieces: &[(&str, &[u8])]| {
        let mut all: Vec<(&str, &[u8])> = vec![("a.ovf", &text)];
        all.extend(pieces);
        tar(&all)
    };
    let package = open(&pack(&pieces)).unwrap();
    assert_eq!(bytes_of(&package, 0), b"abcdefgh");
    fails(&pack(&[pieces[0], pieces[2]]), "3 bytes of 'd.vmdk'");
    fails(&pack(&[pieces[2]]), "no file");
    fails(&pack(&[pieces[0], ("d.vmdk.000000001", b"de"), pieces[2]]), "each piece but the last");
    fails(&pack(&[pieces[0], ("d.vmdk.000000001", b"defgh")]), "3 bytes at most");
    let one: [(&str, &[u8]); 2] = [("a.ovf", &ovf("href='d' compression='gzip'", "")), ("d", b"x")];
    assert!(open(&tar(&one)).unwrap().disks()[0].gzipped());
    let other = ovf("href='d' compression='bzip2'", "");
    fails(&tar(&[("a.ovf", &other), ("d", b"x")]), "'bzip2'");
    let child = ovf("href='d'", "parentRef='p'");
    fails(&tar(&[("a.ovf", &child), ("d", b"x")]), "stands on");
}

/// Fails if the work takes more than three seconds of processor time: quadratic work takes minutes.
fn soon<T>(work: impl FnOnce() -> T) -> T {
    let start = processor_time();
    let done = work();
    let took = processor_time() - start;
    assert!(took < Duration::from_secs(3), "{took:?}");
    done
}

/// An appliance of so many disks, each in one of `files`, and of so many pieces of a file `d`.
fn in_pieces(files: &[&str], disks: usize, piece: &[u8], pieces: usize) -> Vec<u8> {
    let list = files.iter().enumerate().map(|(id, file)| format!("<File id='{id}' {file}/>"));
    let list: String = list.collect();
    let disks =
        (0..disks).map(|id| format!("<Disk diskId='{id}' fileRef='{}'/>", id % files.len()));
    let disks: String = disks.collect();
    let text = format!(
        "<Envelope><References>{list}</References><DiskSection>{disks}</DiskSection></Envelope>"
    );
    let names: Vec<_> = (0..pieces).map(|number| format!("d.{number:09}")).collect();
    let mut all = vec![("a.ovf", text.as_bytes())];
    all.extend(names.iter().map(|name| (name.as_str(), piece)));
    tar(&all)
}

/// No small archive makes the command work for hours, or fills the memory.
#[test]
fn many_pieces_and_disks_are_refused_soon() {
    let nothing = in_pieces(&["href='d' chunkSize='0'"], 4096, b"", 65_000);
    soon(|| fails(&nothing, "a chunkSize of 0"));
    let empty = in_pieces(&["href='d' chunkSize='1'"], 4096, b"", 65_000);
    soon(|| fails(&empty, "1 bytes of each piece but the last"));
    // The same file again and again.
    let again = in_pieces(&["href='d' chunkSize='1'"; 4096], 4096, b"x", 20_000);
    soon(|| fails(&again, "number of pieces"));
}

#[test]
fn a_disk_in_many_pieces_is_opened_soon_and_its_disks_share_them() {
    let bytes = in_pieces(&["href='d' chunkSize='1'"], 4096, b"x", 20_000);
    let package = soon(|| open(&bytes)).unwrap();
    let (first, last) = (&package.disks()[0], &package.disks()[4095]);
    assert_eq!((first.members.len(), first.file_bytes()), (20_000, 20_000));
    assert!(Arc::ptr_eq(&first.members, &last.members));
    assert!(Arc::ptr_eq(&package.storage_of(0).unwrap(), &package.storage_of(4095).unwrap()));
    assert!(bytes_of(&package, 4095) == vec![b'x'; 20_000]);
}

/// A manifest may repeat a line, but each line does not hash the file again.
#[test]
fn a_file_with_many_lines_is_hashed_once() {
    let text = format!("<Envelope>{}</Envelope>", " ".repeat(1 << 20));
    let lines = format!("SHA256(a.ovf)= {}\n", sha256(text.as_bytes())).repeat(40_000);
    let files = [("a.ovf", text.as_bytes()), ("a.mf", lines.as_bytes())];
    soon(|| open(&tar(&files))).unwrap();
}

#[test]
fn names_from_strangers_make_harmless_names() {
    let stem = |href: &str, id: &str| {
        let file = FileReference {
            id: "f".into(),
            href: href.into(),
            size: None,
            compression: None,
            chunk_bytes: None,
        };
        let disk =
            VirtualDisk { id: id.into(), file: None, capacity: None, format: None, parent: None };
        PackagedDisk { disk, file: Some(file), members: Arc::default(), window: None }.safe_stem()
    };
    for (href, id, wanted) in [
        ("disk.vmdk", "d", Some("disk")),
        ("my disk (1).vmdk.gz", "d", Some("my disk (1)")),
        ("Gerät-disk1.vmdk", "d", Some("Gerät-disk1")),
        ("../../etc/passwd", "d", Some("d")),
        ("/etc/passwd.vmdk", "d", Some("d")),
        ("..", "../d", None),
        (".hidden.vmdk", "-rf", None),
        ("a\nb", "a\0b", None),
        ("a\u{202e}b.vmdk", "\u{1b}[31m", None),
        ("a\\b.vmdk", "C:x", None),
        ("x.", "", Some("x")),
        ("", "", None),
    ] {
        assert_eq!(stem(href, id).as_deref(), wanted, "{href:?} {id:?}");
    }
    assert_eq!(stem(&"x".repeat(101), "d").as_deref(), Some("d"));
}

#[test]
fn disks_are_named_by_number_id_and_file() {
    let text = "<Envelope><References><File id='f' href='d.vmdk'/></References><DiskSection>\
                <Disk diskId='one' fileRef='f'/><Disk diskId='2' capacity='5'/>\
                <Disk diskId='7'/></DiskSection></Envelope>";
    let package = open(&tar(&[("a.ovf", text.as_bytes()), ("d.vmdk", b"disk")])).unwrap();
    for (which, index) in [("1", 0), ("one", 0), ("d.vmdk", 0), ("2", 1), ("7", 2), ("3", 2)] {
        assert_eq!(package.find(which).unwrap(), index, "{which}");
    }
    for which in ["0", "4", "two", ""] {
        let error = package.find(which).unwrap_err().to_string();
        assert!(error.contains("1 'one' (d.vmdk), 2 '2' (empty)"), "{error}");
    }
    assert!(package.storage_of(1).is_none());
}

#[test]
fn an_ova_is_told_by_its_first_file() {
    let text = ovf("href='d'", "");
    assert!(Package::is_one(&tar(&[("a.OVF", &text), ("d", b"x")])));
    let other = tar(&[("d", b"x"), ("a.ovf", &text)]);
    assert!(!Package::is_one(&other) && Package::is_tar(&other));
    assert!(Package::is_header(&other[..512]) && !Package::is_header(&other[..511]));
    assert!(!Package::is_header(&[0; 512]));
    assert!(!Package::is_tar(&[0; 1024]) && !Package::is_tar(b"KDMV"));
}
