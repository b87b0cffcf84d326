//! `vdkit convert` from and to streams: pipes, packed files, HTTP.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use crate::common::pki::certificates;
use crate::common::{self, Scratch, peer};
use vdkit_testkit::http::{HttpFaults, HttpServer};
use vdkit_testkit::{Killed, Rng};

const MIB: usize = 1 << 20;

/// A disk with random data, text and zeroes, of no round size.
fn disk(bytes: usize) -> Vec<u8> {
    let mut rng = Rng::new(7);
    let mut disk = vec![0; bytes];
    for (index, piece) in disk.chunks_mut(300_000).enumerate() {
        match index % 4 {
            0 => rng.fill(piece),
            1 => piece.fill(b'a' + (index % 20) as u8),
            _ => {}
        }
    }
    disk
}

/// What the program makes of these bytes on its standard input.
fn through(program: &str, arguments: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}; `make peers` installs it"));
    let mut input = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}");
    output.stdout
}

fn sha256(bytes: &[u8]) -> String {
    let line = String::from_utf8(through("sha256sum", &[], bytes)).unwrap();
    format!("sha256:{}", line.split(' ').next().unwrap())
}

/// Runs the command with these bytes on its standard input, and asks for success.
fn piped(scratch: &Scratch, arguments: &[&str], bytes: &[u8]) -> Vec<u8> {
    let mut command = scratch.command(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    // Beside the reading: a pipe holds little.
    let writer = std::thread::spawn(move || input.write_all(&bytes).unwrap());
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "vdkit {arguments:?}: {errors}");
    writer.join().unwrap();
    output.stdout
}

#[test]
fn a_raw_disk_comes_through_a_pipe_without_a_spool() {
    let scratch = Scratch::new();
    // Longer than the first steps of a target whose length is not known yet.
    let bytes = disk(70 * MIB + 512);
    scratch.write("disk.raw", &bytes);
    // A spool would fail: there is no such folder.
    let no_spool = |arguments: &[&str]| {
        let mut command = scratch.command(arguments);
        command.env("TMPDIR", "/nowhere").stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success(), "{arguments:?}");
    };
    no_spool(&["convert", "-", "a.qcow2"]);
    scratch.same("disk.raw", "a.qcow2");
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "a.qcow2"]);
    no_spool(&["convert", "--compress", "-", "b.qcow2"]);
    scratch.same("disk.raw", "b.qcow2");
    no_spool(&["convert", "-", "c.raw"]);
    assert!(std::fs::read(scratch.path("c.raw")).unwrap() == bytes);
    no_spool(&["convert", "-", "null:"]);
    // Into what is there: what lies behind the stream's end stays.
    let mut old = vec![0xee; bytes.len() + MIB];
    scratch.write("old.raw", &old);
    no_spool(&["convert", "--into", "-O", "raw", "-", "old.raw"]);
    old[..bytes.len()].copy_from_slice(&bytes);
    assert!(std::fs::read(scratch.path("old.raw")).unwrap() == old);
    let wanted = ["a.qcow2", "b.qcow2", "c.raw", "disk.raw", "old.raw"];
    assert_eq!(scratch.names(), wanted);
}

/// A pipe that ends where a step ends, and short ones.
#[test]
fn streams_of_any_length() {
    let scratch = Scratch::new();
    for len in [0, 1, 511, 512, 65_536, MIB + 1, 64 * MIB] {
        let mut bytes = disk(len);
        let convert = ["convert", "--allow-empty", "-", "x.qcow2", "--progress", "none"];
        piped(&scratch, &convert, &bytes);
        let out = scratch.ok(&["convert", "x.qcow2", "-O", "raw", "-"]).bytes;
        bytes.resize(len.next_multiple_of(512), 0);
        assert!(out == bytes, "{len}: {}", out.len());
    }
}

#[test]
fn a_stream_that_is_too_long_is_refused() {
    let scratch = Scratch::new();
    scratch.write("small.raw", &[1; MIB]);
    let arguments = ["convert", "--into", "-O", "raw", "-", "small.raw"];
    let answer = scratch.run_with_input(&arguments, &disk(2 * MIB));
    assert_eq!(answer.code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("goes on after"), "{answer:?}");
}

#[test]
fn other_formats_are_spooled_and_leave_nothing() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &disk(5 * MIB));
    scratch.ok(&["convert", "--compress", "disk.raw", "disk.qcow2"]);
    let image = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    piped(&scratch, &["convert", "--verify", "-", "copy.raw"], &image);
    scratch.same("disk.raw", "copy.raw");
    // What must be read twice is spooled too.
    let bytes = std::fs::read(scratch.path("disk.raw")).unwrap();
    piped(&scratch, &["convert", "--verify", "-", "again.qcow2"], &bytes);
    scratch.same("disk.raw", "again.qcow2");
    let preallocated = ["convert", "-o", "preallocation=metadata", "-", "full.qcow2"];
    piped(&scratch, &preallocated, &bytes);
    scratch.same("disk.raw", "full.qcow2");
    // With -f raw the image's own bytes are the disk.
    piped(&scratch, &["convert", "-f", "raw", "-", "nested.raw"], &image);
    let mut wanted = image.clone();
    wanted.resize(image.len().next_multiple_of(512), 0);
    assert!(std::fs::read(scratch.path("nested.raw")).unwrap() == wanted);
    // What an image from nowhere names lies nowhere that is allowed.
    scratch.ok(&["create", "top.qcow2", "-b", "disk.raw", "-F", "raw"]);
    let top = std::fs::read(scratch.path("top.qcow2")).unwrap();
    let answer = scratch.run_with_input(&["convert", "-", "flat.raw"], &top);
    assert_eq!(answer.code, Some(5), "{answer:?}");
    piped(&scratch, &["convert", "--allow-ref", ".", "-", "flat.raw"], &top);
    scratch.same("disk.raw", "flat.raw");
    assert!(scratch.names().iter().all(|name| !name.starts_with('.')), "{:?}", scratch.names());
}

#[test]
fn packed_files_are_told_by_their_content() {
    let scratch = Scratch::new();
    let bytes = disk(9 * MIB);
    scratch.write("disk.raw", &bytes);
    scratch.ok(&["convert", "disk.raw", "disk.qcow2"]);
    let image = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    for (program, arguments) in
        [("gzip", &["-1"][..]), ("xz", &["-1"]), ("zstd", &["-q", "-3"]), ("xz", &["-0", "-T2"])]
    {
        // The name says nothing.
        let packed = through(program, arguments, &bytes);
        scratch.write("packed", &packed);
        scratch.ok(&["convert", "packed", "out.qcow2", "--checksum", &sha256(&packed)]);
        scratch.same("disk.raw", "out.qcow2");
        piped(&scratch, &["convert", "-", "piped.qcow2"], &packed);
        scratch.same("disk.raw", "piped.qcow2");
        // As they are where the user says that these are the disk's bytes.
        scratch.ok(&["convert", "-f", "raw", "packed", "asis.raw"]);
        let asis = std::fs::read(scratch.path("asis.raw")).unwrap();
        assert!(asis[..packed.len()] == packed);
        scratch.write("packed", &through(program, arguments, &image));
        scratch.ok(&["convert", "packed", "image.raw"]);
        scratch.same("disk.raw", "image.raw");
        // Half of it is an error, and leaves what was there.
        let before = std::fs::read(scratch.path("out.qcow2")).unwrap();
        scratch.write("half", &packed[..packed.len() / 2]);
        scratch.fails(1, "half", &["convert", "half", "out.qcow2"]);
        assert!(std::fs::read(scratch.path("out.qcow2")).unwrap() == before);
    }
}

#[test]
fn a_wrong_checksum_makes_nothing() {
    let scratch = Scratch::new();
    let bytes = disk(3 * MIB);
    scratch.write("disk.raw", &bytes);
    let right = sha256(&bytes);
    let wrong = sha256(b"another");
    for target in ["new.qcow2", "new.raw"] {
        let arguments = ["convert", "disk.raw", target, "--checksum", &wrong];
        let answer = scratch.fails(1, "the checksum is", &arguments);
        assert!(answer.stderr.contains(&right) && answer.stderr.contains(&wrong), "{answer:?}");
    }
    assert_eq!(scratch.names(), ["disk.raw"]);
    scratch.ok(&["convert", "disk.raw", "new.qcow2", "--checksum", &right]);
    scratch.same("disk.raw", "new.qcow2");
    scratch.fails(2, "", &["convert", "disk.raw", "x.raw", "--checksum", "sha256:12"]);
    let two = ["convert", "disk.raw", "disk.raw", "x.raw", "--checksum", &right];
    scratch.fails(2, "one source", &two);
}

#[test]
fn standard_output_takes_a_raw_disk_in_order() {
    let scratch = Scratch::new();
    let bytes = disk(20 * MIB);
    scratch.write("disk.raw", &bytes);
    scratch.ok(&["convert", "--compress", "disk.raw", "disk.qcow2"]);
    for source in ["disk.raw", "disk.qcow2"] {
        let answer = scratch.ok(&["convert", source, "-O", "raw", "-"]);
        assert!(answer.bytes == bytes, "{source}");
        let four = ["convert", "--threads", "4", "--detect-zeros", "off", source, "-"];
        assert!(scratch.ok(&four).bytes == bytes, "{source}");
    }
    // From a pipe to a pipe.
    assert!(piped(&scratch, &["convert", "-", "-"], &bytes) == bytes);
    let qcow2 = scratch.fails(
        1,
        "cannot be written to a pipe",
        &["convert", "disk.raw", "-O", "qcow2", "-"],
    );
    assert!(qcow2.stderr.contains("raw"), "{qcow2:?}");
    for option in ["--json", "--verify", "--into"] {
        scratch.fails(2, option, &["convert", option, "disk.raw", "-"]);
    }
}

/// A format with metadata that is written in one pass, also from a source of unknown length.
#[test]
fn a_stream_optimized_vmdk_leaves_in_one_pass() {
    let scratch = Scratch::new();
    let bytes = disk(20 * MIB);
    scratch.write("disk.raw", &bytes);
    let to_pipe = ["-O", "vmdk", "-o", "subformat=streamOptimized", "-"];
    for (source, input) in [("disk.raw", &[][..]), ("-", &bytes)] {
        for threads in ["1", "4"] {
            let arguments = [&["convert", "--threads", threads, source][..], &to_pipe].concat();
            let image = piped(&scratch, &arguments, input);
            scratch.write("out.vmdk", &image);
            scratch.same("disk.raw", "out.vmdk");
            peer(&scratch.path(""), "qemu-img", &["check", "-q", "out.vmdk"]);
            scratch.ok(&["check", "out.vmdk"]);
            // And back, through a pipe: it is read here and there, so it is spooled.
            assert!(piped(&scratch, &["convert", "-", "-O", "raw", "-"], &image) == bytes);
        }
    }
    let sparse = ["convert", "disk.raw", "-O", "vmdk", "-"];
    scratch.fails(1, "cannot be written to a pipe", &sparse);
}

/// The reader's end closes: an error, not a signal.
#[test]
fn a_reader_that_goes_away_is_an_error() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &disk(20 * MIB));
    let mut command = scratch.command(&["convert", "disk.raw", "-"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn images_on_a_server_are_read_in_place() {
    let scratch = Scratch::new();
    let bytes = disk(23 * MIB);
    scratch.write("disk.raw", &bytes);
    scratch.ok(&["convert", "--compress", "disk.raw", "disk.qcow2"]);
    let image = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    let faults = HttpFaults { cut_after: Some(1_500_000), busy: 1, ..HttpFaults::default() };
    for (content, hash) in [(&bytes, sha256(&bytes)), (&image, sha256(&image))] {
        let server = HttpServer::start(content.clone(), faults.clone());
        scratch.ok(&["convert", "--verify", server.url(), "a.qcow2"]);
        scratch.same("disk.raw", "a.qcow2");
        scratch.ok(&["convert", server.url(), "b.qcow2", "--checksum", &hash]);
        scratch.same("disk.raw", "b.qcow2");
    }
    // Packed, and from a server that knows no ranges.
    let packed = through("xz", &["-0"], &bytes);
    for no_ranges in [false, true] {
        let faults = HttpFaults { no_ranges, ..HttpFaults::default() };
        let server = HttpServer::start(packed.clone(), faults.clone());
        scratch.ok(&["convert", server.url(), "c.qcow2", "--checksum", &sha256(&packed)]);
        scratch.same("disk.raw", "c.qcow2");
        for content in [&bytes, &image] {
            let server = HttpServer::start(content.clone(), faults.clone());
            scratch.ok(&["convert", server.url(), "d.raw"]);
            scratch.same("disk.raw", "d.raw");
        }
    }
    let faults = HttpFaults { no_ranges: true, cut_after: Some(MIB), ..HttpFaults::default() };
    let server = HttpServer::start(bytes.clone(), faults);
    scratch.fails(1, "broke off", &["convert", server.url(), "e.raw"]);
    assert!(!scratch.path("e.raw").exists());
}

/// An URL that an image names is never opened.
#[test]
fn urls_from_metadata_stay_refused() {
    let scratch = Scratch::new();
    let server = HttpServer::start(disk(MIB), HttpFaults::default());
    let create =
        ["create", "-q", "-u", "-f", "qcow2", "-b", server.url(), "-F", "raw", "x.qcow2", "1M"];
    peer(&scratch.path(""), "qemu-img", &create);
    scratch.fails(5, "http:", &["convert", "x.qcow2", "x.raw"]);
    assert_eq!(server.requests(), 0);
}

/// A pipe that says nothing does not keep an interrupt away.
#[test]
fn waiting_for_a_pipe_can_be_interrupted() {
    let scratch = Scratch::new();
    let mut command = scratch.command(&["convert", "-f", "raw", "-", "x.qcow2"]);
    let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Its end would not be an interrupt.
    let mut held = child.stdin.take().unwrap();
    held.write_all(&[1; 100_000]).unwrap();
    common::wait_until_signals_are_handled(child.id());
    // Once it has read all, it waits for more.
    common::wait_until(|| rustix::io::ioctl_fionread(&held).unwrap() == 0);
    common::signal(child.id(), "INT");
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    drop(held);
    assert_eq!(scratch.names(), [""; 0]);
}

/// A server that ends TLS before an HTTP server, with the certificate of `pki/server`, on all of this
/// machine's addresses; killed at the end. The file `asked` has a line for each connection.
struct TlsProxy {
    _child: Killed,
    port: String,
}

impl TlsProxy {
    fn start(scratch: &Scratch, to: &str) -> Self {
        let program = format!(
            "import socket, ssl, threading\n\
             context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n\
             context.load_cert_chain('pki/server-cert.pem', 'pki/server-key.pem')\n\
             listener = socket.create_server(('0.0.0.0', 0))\n\
             asked = open('asked', 'a')\n\
             print(listener.getsockname()[1], flush=True)\n\
             def serve(plain):\n \
              try:\n  \
               with context.wrap_socket(plain, server_side=True) as client:\n   \
                with socket.create_connection(('127.0.0.1', {to})) as server:\n    \
                 head = b''\n    \
                 while b'\\r\\n\\r\\n' not in head: head += client.recv(65536) or b'\\r\\n\\r\\n'\n    \
                 server.sendall(head)\n    \
                 while piece := server.recv(65536): client.sendall(piece)\n \
              except OSError: pass\n\
             while True:\n \
              plain = listener.accept()[0]\n \
              print('x', file=asked, flush=True)\n \
              threading.Thread(target=serve, args=(plain,), daemon=True).start()"
        );
        let mut command = Command::new("python3");
        command.args(["-c", &program]).current_dir(scratch.path("")).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut port = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut port).unwrap();
        Self { _child: Killed(child), port: port.trim().to_owned() }
    }
}

#[test]
fn https_sources_are_read_and_only_from_whom_the_system_trusts() {
    let scratch = Scratch::new();
    if !certificates(&scratch) {
        return;
    }
    let bytes = disk(9 * MIB);
    scratch.write("disk.raw", &bytes);
    peer(&scratch.path(""), "qemu-img", &["convert", "-O", "qcow2", "disk.raw", "disk.qcow2"]);
    let image = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    let server = HttpServer::start(image, HttpFaults::default());
    let plain = server.url().trim_end_matches("/disk").rsplit(':').next().unwrap().to_owned();
    let proxy = TlsProxy::start(&scratch, &plain);
    let convert = |host: &str, trusted: Option<&str>, target: &str| {
        let url = format!("https://{host}:{}/disk", proxy.port);
        let mut command = scratch.command(&["convert", &url, target]);
        // What this machine trusts besides does not matter here.
        command.env_remove("SSL_CERT_DIR").env_remove("SSL_CERT_FILE");
        if let Some(file) = trusted {
            command.env("SSL_CERT_FILE", scratch.path(file));
        }
        let times = || std::fs::read(scratch.path("asked")).unwrap().len();
        let before = times();
        let output = command.output().unwrap();
        let asked = (times() - before) / "x\n".len();
        (output.status.code(), String::from_utf8(output.stderr).unwrap(), asked)
    };
    for host in ["localhost", "127.0.0.1"] {
        let (code, text, _) = convert(host, Some("pki/ca-cert.pem"), "a.raw");
        assert_eq!(code, Some(0), "{text}");
        scratch.same("disk.raw", "a.raw");
    }
    let asked = server.requests();
    // Nobody vouches for it; another authority does; its name is another one.
    for (host, trusted) in [
        ("localhost", None),
        ("localhost", Some("pki/client-cert.pem")),
        ("127.0.0.2", Some("pki/ca-cert.pem")),
    ] {
        let (code, text, times) = convert(host, trusted, "b.raw");
        assert_eq!(code, Some(1), "{host} {trusted:?}: {text}");
        assert!(text.contains("cannot be trusted"), "{host} {trusted:?}: {text}");
        // It is not asked again and again.
        assert_eq!(times, 1, "{host} {trusted:?}");
    }
    assert_eq!(server.requests(), asked, "asked without trust");
    assert!(!scratch.names().iter().any(|name| name.contains("b.raw")));
}

/// Otherwise all 4 TiB are gone through.
#[test]
fn a_stream_into_a_much_larger_target_is_done_at_its_end() {
    let scratch = Scratch::new();
    let bytes = disk(MIB);
    std::fs::File::create(scratch.path("large")).unwrap().set_len(4 << 40).unwrap();
    let answer = scratch.run_with_input(&["convert", "-n", "-O", "raw", "-", "large"], &bytes);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert!(scratch.ok(&["read", "-f", "raw", "large", "0", "1M"]).bytes == bytes);
}

#[test]
fn the_size_that_a_format_made_of_a_stream_is_told() {
    let scratch = Scratch::new();
    for target in ["a.vhd", "a.qcow2"] {
        let answer = scratch.run_with_input(&["convert", "--json", "-", target], &disk(MIB + 512));
        let told: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
        let made = scratch.json_of("info", 0, &[target]);
        assert_eq!(told["virtual-size"], made["virtual-size"], "{target}");
    }
}

#[test]
fn a_signal_ends_the_wait_for_somebody_who_writes_to_a_named_pipe() {
    let scratch = Scratch::new();
    peer(&scratch.folder(), "mkfifo", &["pipe"]);
    let mut command = scratch.command(&["convert", "-f", "raw", "pipe", "a.qcow2"]);
    let mut waiting = command.spawn().unwrap();
    common::wait_until_signals_are_handled(waiting.id());
    common::signal(waiting.id(), "TERM");
    assert_eq!(waiting.wait().unwrap().code(), Some(130));
    let waiting = command.spawn().unwrap();
    let bytes = disk(MIB);
    std::fs::write(scratch.path("pipe"), &bytes).unwrap();
    assert!(waiting.wait_with_output().unwrap().status.success());
    assert!(scratch.ok(&["read", "a.qcow2", "0", "1M"]).bytes == bytes);
}

#[test]
fn a_signal_ends_the_wait_for_a_reader_of_standard_output() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &disk(8 * MIB));
    let mut command = scratch.command(&["convert", "a.raw", "-O", "raw", "-"]);
    let mut waiting = command.stdout(Stdio::piped()).spawn().unwrap();
    // It has begun to write, and goes on no further than the pipe takes.
    let mut output = waiting.stdout.take().unwrap();
    output.read_exact(&mut [0; 4096]).unwrap();
    common::signal(waiting.id(), "TERM");
    assert_eq!(waiting.wait().unwrap().code(), Some(130));
}
