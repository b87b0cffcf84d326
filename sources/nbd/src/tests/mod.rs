//! The client against a server that does what a test says.

mod server;

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vdkit_block::{CacheMode, Error, ErrorKind, HostOffset, Result, Storage, StorageExt, ZeroMode};

use self::server::*;
use crate::channel::{Channel, Socket};
use crate::client::Limits;
use crate::connection::{Connection, IN_FLIGHT_MAX, Request};
use crate::failure::{Broken, Failure};
use crate::handshake::Agreed;
use crate::reply::Expected;
use crate::storage::{BASE_ALLOCATION, NbdOptions, NbdStorage};
use crate::wire::{REQUEST_BYTES, chunk, command, errno, flag, request_flag};

const MIB: usize = 1 << 20;

/// For servers that answer, also on a busy machine.
fn limits() -> Limits {
    let (connect, silence) = (Duration::from_secs(60), Duration::from_secs(60));
    Limits { connect, silence, further_pause: Duration::from_millis(20) }
}

fn open(uri: &str) -> Result<NbdStorage> {
    open_within(uri, limits())
}

/// For servers that do not answer.
fn open_impatiently(uri: &str) -> Result<NbdStorage> {
    let (connect, silence) = (Duration::from_secs(2), Duration::from_millis(500));
    open_within(uri, Limits { connect, silence, ..limits() })
}

fn open_within(uri: &str, limits: Limits) -> Result<NbdStorage> {
    let options = NbdOptions { writable: true, ..NbdOptions::default() };
    NbdStorage::open_within(uri, options, limits)
}

fn scripted(script: impl Fn(&Asked) -> Act + Send + Sync + 'static) -> (Server, NbdStorage) {
    let setup = Setup { script: Box::new(script), ..Setup::default() };
    let server = Server::start(MIB, setup);
    let storage = open(&format!("{}&reconnect=1", server.uri())).unwrap();
    (server, storage)
}

/// The error of a read for which the server sends this.
fn read_error(reply: impl Fn(&Asked) -> Act + Send + Sync + 'static) -> String {
    let (server, storage) = scripted(reply);
    let error = storage.read_at(&mut [0; 4096], HostOffset(8192)).unwrap_err().to_string();
    assert!(error.starts_with(&server.uri()), "{error}");
    error
}

#[test]
fn simple_and_structured_replies_hold_the_same_bytes() {
    for structured in [false, true] {
        for sizes in [None, Some([512, 4096, 65536])] {
            let server = Server::start(MIB, Setup { structured, sizes, ..Setup::default() });
            let storage = open(&server.uri()).unwrap();
            let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
            storage.write_at(&bytes, HostOffset(777)).unwrap();
            let mut read = vec![0; bytes.len()];
            storage.read_at(&mut read, HostOffset(777)).unwrap();
            assert!(read == bytes, "{structured} {sizes:?}");
            storage.write_zeroes(HostOffset(1000), 9000, ZeroMode::KeepAllocated).unwrap();
            storage.discard(HostOffset(1000), 9000).unwrap();
            storage.sync().unwrap();
            let disk = server.disk.lock();
            assert!(disk[777..1000] == bytes[..223] && disk[1000..10_000] == [0; 9000]);
            assert!(disk[10_000..200_777] == bytes[9223..]);
            let asked = server.requests.lock();
            let zeroes = asked.iter().find(|asked| asked.command == command::WRITE_ZEROES).unwrap();
            assert_eq!(zeroes.flags, request_flag::NO_HOLE);
            assert!(asked.iter().any(|asked| asked.command == command::TRIM));
        }
    }
}

#[test]
fn chunks_may_come_in_any_order_with_holes() {
    let (_server, storage) = scripted(|asked| {
        let at = asked.offset;
        let mut bytes = data(asked.cookie, 0, at + 1024, &[3; 1024]);
        bytes.extend(hole(asked.cookie, 0, at + 2048, 2048));
        bytes.extend(piece(asked.cookie, 0, chunk::NONE, b""));
        bytes.extend(data(asked.cookie, chunk::DONE, at, &[5; 1024]));
        Act::Send(bytes)
    });
    let mut read = [9; 4096];
    storage.read_at(&mut read, HostOffset(512)).unwrap();
    assert!(read[..1024] == [5; 1024] && read[1024..2048] == [3; 1024]);
    assert!(read[2048..] == [0; 2048]);
}

#[test]
fn an_error_in_the_middle_of_a_reply_leaves_the_connection_usable() {
    let first = AtomicU32::new(0);
    let (_server, storage) = scripted(move |asked| {
        if first.fetch_add(1, Ordering::SeqCst) > 0 {
            return Act::Follow;
        }
        let mut bytes = data(asked.cookie, 0, asked.offset, &[3; 1024]);
        bytes.extend(error(asked.cookie, 0, errno::IO, "bad\nsector"));
        bytes.extend(hole(asked.cookie, chunk::DONE, asked.offset + 2048, 2048));
        Act::Send(bytes)
    });
    let failed = storage.read_at(&mut [0; 4096], HostOffset(0)).unwrap_err().to_string();
    assert!(failed.contains("input/output error (bad sector)"), "{failed}");
    storage.read_at(&mut [0; 4096], HostOffset(0)).unwrap();
}

#[test]
fn what_breaks_the_protocol_is_an_error_at_once() {
    let begun = Instant::now();
    type Reply = fn(&Asked) -> Vec<u8>;
    let cases: [(&str, Reply); 14] = [
        ("begins with", |_| vec![0xff; 64]),
        ("was not sent", |asked| data(asked.cookie + 1, 1, asked.offset, &[0; 4096])),
        ("was not sent", |asked| data(asked.cookie + 16, 1, asked.offset, &[0; 4096])),
        ("simple reply to a read", |asked| simple(asked.cookie, 0, &[0; 4096])),
        ("bytes of data for", |asked| {
            let mut bytes = data(asked.cookie, 1, asked.offset, b"");
            bytes[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
            bytes
        }),
        ("for a read of", |asked| data(asked.cookie, 1, asked.offset - 1, &[0; 4096])),
        ("for a read of", |asked| data(asked.cookie, 1, u64::MAX, &[0; 16])),
        ("for a read of", |asked| hole(asked.cookie, 1, asked.offset, u32::MAX)),
        ("for a read of", |asked| hole(asked.cookie, 1, asked.offset, 0)),
        ("or twice", |asked| {
            let mut bytes = data(asked.cookie, 0, asked.offset, &[0; 4096]);
            bytes.extend(data(asked.cookie, 1, asked.offset, &[0; 16]));
            bytes
        }),
        ("without all", |asked| data(asked.cookie, 1, asked.offset, &[0; 4095])),
        ("endless", |asked| piece(asked.cookie, 0, chunk::NONE, b"").repeat(5000)),
        ("an error of", |asked| piece(asked.cookie, 1, chunk::ERROR_BIT + 1, &[1; 9000])),
        ("chunk of type 5", |asked| status(asked.cookie, 1, 7, &[(1, 1)])),
    ];
    for (why, reply) in cases {
        let error = read_error(move |asked| Act::Send(reply(asked)));
        assert!(error.contains(why) && error.contains("broke the protocol"), "{why}: {error}");
    }
    // None of them was sent again.
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
}

#[test]
fn a_reply_that_is_cut_off_is_asked_for_again_for_a_while() {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    let error = read_error(move |asked| {
        counter.fetch_add(1, Ordering::SeqCst);
        let whole = data(asked.cookie, chunk::DONE, asked.offset, &[0; 4096]);
        Act::SendAndEnd(whole[..2000].to_vec())
    });
    assert!(error.contains("closed the connection"), "{error}");
    assert!(count.load(Ordering::SeqCst) > 1);
    let first = AtomicU32::new(0);
    let (_server, storage) = scripted(move |_| match first.fetch_add(1, Ordering::SeqCst) {
        0 => Act::End,
        _ => Act::Follow,
    });
    storage.read_at(&mut [0; 4096], HostOffset(0)).unwrap();
}

#[test]
fn a_server_that_is_silent_is_given_up_on_and_nothing_is_sent_again() {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    let (server, _) = scripted(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        Act::Ignore
    });
    let storage = open_impatiently(&server.uri()).unwrap();
    let error = storage.write_at(&[1; 512], HostOffset(0)).unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[test]
fn negotiations_that_break_the_protocol_end() {
    let mut huge = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
    huge.extend(crate::wire::OPTION_REPLY_MAGIC.to_be_bytes());
    huge.extend([0, 0, 0, 8, 0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]);
    let mut other = huge[..26].to_vec();
    other.extend([0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0]);
    for (hello, why) in [
        (b"SSH-2.0-OpenSSH_9.6 something".to_vec(), "no NBD server"),
        (b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0".to_vec(), "oldstyle"),
        (b"NBDMAGICIHAVEOPT\0\0".to_vec(), "fixed newstyle"),
        (huge, "4294967295 bytes"),
        (other, "option 7 instead of 8"),
        (b"NBDMAG".to_vec(), "timed out"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut socket, &hello).unwrap();
            std::thread::sleep(Duration::from_secs(4));
        });
        let uri = format!("nbd+unix:///disk?socket={}", path.display());
        let error = open_impatiently(&uri).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error:?}");
        assert!(error.to_string().contains(why), "{why}: {error}");
    }
}

/// Connecting to a Unix socket waits while the server's queue of clients is full.
#[test]
fn a_server_that_accepts_no_client_is_given_up_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let kind = rustix::net::SocketType::STREAM;
    let listener = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).unwrap();
    let address = rustix::net::SocketAddrUnix::new(&path).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    let uri = format!("nbd+unix:///disk?socket={}", path.display());
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(open_impatiently(&uri).unwrap_err().to_string()));
    let error = receiver.recv_timeout(Duration::from_secs(60)).expect("it waits for ever");
    assert!(error.contains("timed out"), "{error}");
}

#[test]
fn an_unknown_export_is_answered_with_those_that_exist() {
    let server = Server::start(MIB, Setup::default());
    let error = open(&server.uri().replace("disk?", "dusk?")).unwrap_err().to_string();
    assert!(error.contains("'dusk'") && error.contains("it has: disk, other"), "{error}");
    let listed = crate::describe_exports(&server.uri()).unwrap();
    let names: Vec<_> = listed.into_iter().map(|one| one.listed.name).collect();
    assert_eq!(names, ["disk", "other"]);
}

#[test]
fn a_socket_that_is_passed_on_has_no_time_limits() {
    let server = Server::start(MIB, Setup::default());
    let uri = server.uri();
    let (_, path) = uri.split_once("socket=").unwrap();
    let socket = UnixStream::connect(path).unwrap();
    let told = crate::open_simple(socket.try_clone().unwrap(), "disk").unwrap();
    assert_eq!((told.bytes, told.flags), (MIB as u64, FLAGS));
    assert_eq!((socket.read_timeout().unwrap(), socket.write_timeout().unwrap()), (None, None));
    let unknown = crate::open_simple(UnixStream::connect(path).unwrap(), "dusk").unwrap_err();
    assert!(unknown.to_string().contains("no such export"), "{unknown}");
}

#[test]
fn bad_block_sizes_and_read_only_exports_are_refused() {
    for sizes in [[0, 4096, 65536], [3, 4096, 65536], [512, 256, 65536], [4096, 4096, 100]] {
        let setup = Setup { sizes: Some(sizes), ..Setup::default() };
        let server = Server::start(MIB, setup);
        assert!(open(&server.uri()).unwrap_err().to_string().contains("blocks of"));
    }
    let setup = Setup { flags: FLAGS | flag::READ_ONLY, ..Setup::default() };
    let server = Server::start(MIB, setup);
    assert!(matches!(open(&server.uri()), Err(Error::ReadOnly { .. })));
}

#[test]
fn block_status_of_two_contexts() {
    let setup = Setup {
        script: Box::new(|asked| {
            let mut bytes = status(asked.cookie, 0, 9, &[(4096, 1), (asked.len, 0)]);
            let runs = [(4096, 3), (4096, 2), (8192, 0), (4096, 1), (1 << 30, 3)];
            bytes.extend(status(asked.cookie, chunk::DONE, 7, &runs));
            Act::Send(bytes)
        }),
        ..Setup::default()
    };
    let server = Server::start(MIB, setup);
    let options = NbdOptions { contexts: vec!["x:other".to_owned()], ..NbdOptions::default() };
    let storage = NbdStorage::open_within(&server.uri(), options, limits()).unwrap();
    let extent = |offset, len| {
        let found = (&storage as &dyn Storage).extent_at(HostOffset(offset), len).unwrap();
        (found.data, found.len)
    };
    assert_eq!(extent(0, MIB as u64), (false, 8192));
    assert_eq!(extent(4096, MIB as u64), (false, 4096));
    // A hole that is not said to read as zero is data.
    assert_eq!(extent(8192, MIB as u64), (true, 12288));
    assert_eq!(extent(20480, MIB as u64), (false, MIB as u64 - 20480));
    assert_eq!(extent(20480, 10), (false, 10));
    assert_eq!(server.count(command::BLOCK_STATUS), 1);
    let runs = storage.status("x:other", 0, MIB as u64).unwrap();
    assert_eq!((runs[0].bytes, runs[0].flags, runs.len()), (4096, 1, 2));
    let lacking = NbdOptions { contexts: vec!["x:lacking".to_owned()], ..NbdOptions::default() };
    let error = NbdStorage::open_within(&server.uri(), lacking, limits()).unwrap_err();
    assert!(error.to_string().contains("x:lacking"), "{error}");
    assert_eq!(BASE_ALLOCATION, "base:allocation");
}

/// A server may send a thousand of them, each of a megabyte.
#[test]
fn block_status_of_contexts_that_nobody_asked_for_is_not_kept() {
    for asked_for in [true, false] {
        let setup = Setup {
            script: Box::new(move |asked| {
                let others = (100..140).flat_map(|id| status(asked.cookie, 0, id, &[(4096, 1)]));
                let mut bytes: Vec<u8> = others.collect();
                let id = if asked_for { 7 } else { 140 };
                bytes.extend(status(asked.cookie, chunk::DONE, id, &[(asked.len, 3)]));
                Act::Send(bytes)
            }),
            ..Setup::default()
        };
        let server = Server::start(MIB, setup);
        let storage = open(&server.uri()).unwrap();
        match storage.status(BASE_ALLOCATION, 0, 512) {
            Ok(runs) => assert!(asked_for && runs.len() == 1 && runs[0].flags == 3, "{runs:?}"),
            Err(error) => assert!(!asked_for && error.to_string().contains("without any")),
        }
    }
}

#[test]
fn a_killed_server_is_found_again_within_the_time_limit() {
    let server = Server::start(MIB, Setup::default());
    let uri = format!("{}&reconnect=8", server.uri());
    let path = uri.split("socket=").nth(1).unwrap().split('&').next().unwrap().to_owned();
    let storage = open(&uri).unwrap();
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    storage.sync().unwrap();
    let disk = server.disk.clone();
    server.kill();
    let again = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(400));
        Server::start_at(path.into(), disk, Setup::default())
    });
    let mut read = [0; 512];
    storage.read_at(&mut read, HostOffset(0)).unwrap();
    assert_eq!(read, [7; 512]);
    let again = again.join().unwrap();
    // All writes were flushed before, so nothing is in doubt.
    storage.write_at(&[8; 512], HostOffset(512)).unwrap();
    storage.sync().unwrap();
    again.kill();
    let short = storage.read_at(&mut read, HostOffset(0));
    drop(again);
    assert!(short.is_err());
}

#[test]
fn after_the_time_limit_requests_fail_and_say_so() {
    let server = Server::start(MIB, Setup::default());
    let storage = open(&format!("{}&reconnect=1", server.uri())).unwrap();
    server.kill();
    let begun = Instant::now();
    let error = storage.read_at(&mut [0; 512], HostOffset(0)).unwrap_err().to_string();
    assert!(error.contains("no new one in 1 s"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    // Without a time for reconnections, a lost connection is an error.
    let server = Server::start(MIB, Setup::default());
    let storage = open(&format!("{}&reconnect=0", server.uri())).unwrap();
    server.cut();
    assert!(storage.read_at(&mut [0; 512], HostOffset(0)).is_err());
}

#[test]
fn a_flush_fails_after_an_answered_write_may_be_lost() {
    let server = Server::start(MIB, Setup::default());
    let storage = open(&server.uri()).unwrap();
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    server.cut();
    // The connection is made again, and reads and writes go on.
    storage.write_at(&[8; 512], HostOffset(512)).unwrap();
    for _ in 0..2 {
        let error = storage.sync().unwrap_err().to_string();
        assert!(error.contains("before the answered writes were flushed"), "{error}");
    }
    storage.read_at(&mut [0; 512], HostOffset(0)).unwrap();
}

#[test]
fn a_write_that_was_not_answered_is_sent_again_and_then_flushed() {
    let first = AtomicU32::new(0);
    let (server, storage) = scripted(move |asked| match asked.command {
        command::WRITE if first.fetch_add(1, Ordering::SeqCst) == 0 => Act::End,
        _ => Act::Follow,
    });
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    storage.sync().unwrap();
    assert_eq!((server.count(command::WRITE), server.count(command::FLUSH)), (2, 1));
    assert_eq!(server.disk.lock()[..512], [7; 512]);
}

/// The server's end of a connection, and the client's.
fn connected() -> (TcpStream, Connection) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    let agreed = Agreed {
        bytes: 1 << 30,
        flags: FLAGS,
        structured: false,
        contexts: Vec::new(),
        minimum: 1,
        preferred: 4096,
        maximum: 32 << 20,
    };
    let channel = Channel::Plain(Socket::over(socket));
    (server, Connection::new(channel, agreed, Duration::from_secs(120)).unwrap())
}

/// The server would take it for a request, after the same one on another connection.
#[test]
fn what_a_broken_connection_has_not_sent_is_never_sent() {
    let (mut server, connection) = connected();
    // More than the buffers of both sockets hold.
    let payload = vec![5; 32 << 20];
    let len = payload.len() as u32;
    let write = Request { command: command::WRITE, flags: 0, offset: 0, len, payload: &payload };
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| connection.call(&write, Expected::Nothing));
        server.read_exact(&mut [0; REQUEST_BYTES]).unwrap();
        connection.break_off(Broken::lost("for a test"));
        assert!(sending.join().unwrap().is_err());
    });
    drop(connection);
    let end = server.read_to_end(&mut Vec::new());
    assert!(end.is_err(), "the server got all that the kernel had: {end:?}");
}

#[test]
fn further_connections_are_tried_again_after_the_server_refused_one() {
    let (server, storage) = scripted(|_| {
        std::thread::sleep(Duration::from_millis(1));
        Act::Follow
    });
    let work = || {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        storage.read_at(&mut [0; 512], HostOffset(0)).unwrap();
                    }
                });
            }
        });
    };
    server.is_full.store(true, Ordering::SeqCst);
    work();
    assert_eq!(storage.client_connections(), 1);
    server.is_full.store(false, Ordering::SeqCst);
    let begun = Instant::now();
    while storage.client_connections() < 2 {
        assert!(begun.elapsed() < Duration::from_secs(60), "no further connection");
        work();
    }
}

/// A server that keeps writes in a cache until a flush, and loses the cache in a crash.
#[test]
fn no_flush_of_several_threads_claims_a_write_that_a_crash_has_lost() {
    for round in 0..30 {
        let folder = tempfile::tempdir().unwrap();
        let disk = Arc::new(Mutex::new(vec![0; MIB]));
        let durable = Arc::new(Mutex::new(vec![0; MIB]));
        let (cache, flushed) = (disk.clone(), durable.clone());
        let script = Box::new(move |asked: &Asked| {
            if asked.command == command::FLUSH {
                let disk = cache.lock();
                flushed.lock().copy_from_slice(&disk);
            }
            Act::Follow
        });
        let server =
            Server::start_at(folder.path().join("s"), disk, Setup { script, ..Setup::default() });
        let storage = open(&server.uri()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (storage, durable) = (&storage, &durable);
                scope.spawn(move || {
                    let mut fails = false;
                    for value in 1..=60 {
                        storage.write_at(&[value; 512], HostOffset(thread * 512)).unwrap();
                        if !value.is_multiple_of(3) {
                            continue;
                        }
                        let claims = storage.sync().is_ok();
                        assert!(!claims || !fails, "a flush after a failed one succeeds");
                        fails |= !claims;
                        let kept = durable.lock()[thread as usize * 512];
                        assert!(!claims || kept >= value, "{value} is claimed, {kept} is kept");
                    }
                });
            }
            std::thread::sleep(Duration::from_micros(100 * round));
            server.crash(|disk| disk.copy_from_slice(&durable.lock()));
        });
    }
}

#[test]
fn fua_writes_are_never_in_doubt() {
    let server = Server::start(MIB, Setup::default());
    let cache = CacheMode::Writethrough;
    let options = NbdOptions { writable: true, cache, ..NbdOptions::default() };
    let storage = NbdStorage::open_within(&server.uri(), options, limits()).unwrap();
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    server.cut();
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    storage.sync().unwrap();
    let asked = server.requests.lock();
    let mut writes = asked.iter().filter(|asked| asked.command == command::WRITE);
    assert!(writes.all(|asked| asked.flags == request_flag::FUA));
}

#[test]
fn a_failed_flush_stays_failed() {
    let first = AtomicU32::new(0);
    let (_server, storage) = scripted(move |asked| match asked.command {
        command::FLUSH if first.fetch_add(1, Ordering::SeqCst) == 0 => {
            Act::Send(error(asked.cookie, chunk::DONE, errno::NOSPC, ""))
        }
        _ => Act::Follow,
    });
    assert!(storage.sync().unwrap_err().to_string().contains("no space left"));
    assert!(storage.sync().unwrap_err().to_string().contains("an earlier flush failed"));
}

/// Without a server, a flush fails. If nothing was unflushed, nothing was lost.
#[test]
fn a_flush_without_a_server_puts_nothing_in_doubt() {
    let server = Server::start(MIB, Setup::default());
    let uri = server.uri();
    let storage = open(&format!("{uri}&reconnect=1")).unwrap();
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    storage.sync().unwrap();
    server.kill();
    let error = storage.sync().unwrap_err().to_string();
    assert!(error.contains("no new one in 1 s"), "{error}");
    let path = uri.split_once("socket=").unwrap().1.into();
    let again = Server::start_at(path, server.disk.clone(), Setup::default());
    storage.sync().unwrap();
    storage.write_at(&[8; 512], HostOffset(0)).unwrap();
    storage.sync().unwrap();
    // A write that is in doubt stays so, also if a flush fails during the outage.
    storage.write_at(&[9; 512], HostOffset(0)).unwrap();
    again.kill();
    storage.sync().unwrap_err();
    let path = uri.split_once("socket=").unwrap().1.into();
    let _third = Server::start_at(path, server.disk.clone(), Setup::default());
    let error = storage.sync().unwrap_err().to_string();
    assert!(error.contains("before the answered writes were flushed"), "{error}");
}

/// A name that is not printable, or longer than a message, is asked for as the server sent it.
#[test]
fn exports_are_described_by_their_exact_names() {
    let names: [&[u8]; 4] = [b" disk ", b"a\tb\x1b[2J", &[b'x'; 4096], b"\xff\xfe"];
    let exports = names.iter().map(|name| name.to_vec()).collect();
    let server = Server::start(MIB, Setup { exports, ..Setup::default() });
    let described = crate::describe_exports(&server.uri()).unwrap();
    assert!(described.iter().all(|one| one.info.as_ref().is_some_and(|info| info.bytes == 7)));
    let shown: Vec<_> = described.into_iter().map(|one| one.listed.name).collect();
    assert_eq!(shown, ["disk", "a b [2J", &"x".repeat(512), "\u{fffd}\u{fffd}"]);
}

/// The kernel drops the requests for a connection that a full queue has no place for.
#[test]
fn an_address_without_an_answer_leaves_time_for_the_next_one() {
    let kind = rustix::net::SocketType::STREAM;
    let full = rustix::net::socket(rustix::net::AddressFamily::INET, kind, None).unwrap();
    rustix::net::bind(&full, &"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap()).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let dead = TcpListener::from(full);
    let dead_at = dead.local_addr().unwrap();
    let _queued = TcpStream::connect(dead_at).unwrap();
    let short = Duration::from_millis(100);
    assert!(TcpStream::connect_timeout(&dead_at, short).is_err(), "the queue has room");
    let alive = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [dead_at, alive.local_addr().unwrap()];
    Socket::first_of(&addresses, Instant::now() + Duration::from_secs(3)).unwrap();
    assert!(Socket::first_of(&addresses[..1], Instant::now() + short).is_err());
}

#[test]
fn requests_in_flight_are_bounded() {
    // Replies are held back until no further request comes.
    let held: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (most, holding) = (Arc::new(AtomicUsize::new(0)), held.clone());
    let counter = most.clone();
    let setup = Setup {
        flags: FLAGS & !flag::CAN_MULTI_CONN,
        script: Box::new(move |asked| {
            let mut held = holding.lock();
            held.push(asked.cookie);
            counter.fetch_max(held.len(), Ordering::SeqCst);
            if held.len() < IN_FLIGHT_MAX {
                return Act::Ignore;
            }
            // In the reverse order.
            let replies = held.drain(..).rev().flat_map(|cookie| simple(cookie, 0, b""));
            Act::Send(replies.collect())
        }),
        ..Setup::default()
    };
    let server = Server::start(MIB, setup);
    let storage = open(&server.uri()).unwrap();
    std::thread::scope(|scope| {
        for i in 0..4 * IN_FLIGHT_MAX as u64 {
            let storage = &storage;
            scope.spawn(move || storage.write_at(&[1; 512], HostOffset(i * 512)).unwrap());
        }
    });
    assert_eq!(most.load(Ordering::SeqCst), IN_FLIGHT_MAX);
    assert_eq!(server.count(command::WRITE), 4 * IN_FLIGHT_MAX);
}

/// Neither the end of a disk in a child nor a request there may touch the connections of its parent.
#[test]
fn a_child_of_fork_leaves_the_connection_to_its_parent() {
    let server = Server::start(MIB, Setup::default());
    let storage = open(&format!("{}&reconnect=0", server.uri())).unwrap();
    storage.write_at(&[7; 512], HostOffset(0)).unwrap();
    let asked = server.requests.lock().len();
    let mut inherited = Some(storage);
    let leaves_it = || {
        let own = inherited.take().unwrap();
        let failed = [own.read_at(&mut [0; 512], HostOffset(0)), own.sync()];
        drop(own);
        failed.iter().all(|done| {
            done.as_ref().is_err_and(|error| error.to_string().contains("open it after the fork"))
        })
    };
    assert!(vdkit_testbase::in_child(|| (), leaves_it), "the child has used the connection");
    assert_eq!(server.requests.lock().len(), asked, "the child has sent something");
    let storage = inherited.unwrap();
    let mut read = [0; 512];
    storage.read_at(&mut read, HostOffset(0)).unwrap();
    assert_eq!(read, [7; 512]);
    // Answered by the same connection, or else it would fail.
    storage.sync().unwrap();
}

/// A sibling was silent: then nothing is sent again, whoever notices it how.
#[test]
fn whoever_waits_on_a_connection_that_was_broken_off_hears_why() {
    let (mut server, connection) = connected();
    let read = Request { command: command::READ, flags: 0, offset: 0, len: 512, payload: &[] };
    let mut bytes = [0; 512];
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| connection.call(&read, Expected::Bytes(&mut bytes)));
        // It has the lead, and receives.
        server.read_exact(&mut [0; REQUEST_BYTES]).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        connection.break_off(Broken::protocol("for a test"));
        match waiting.join().unwrap() {
            Err(Failure::Broken(broken)) => assert!(!broken.lost, "{}", broken.why),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn no_space_is_expected_for_the_rest_of_an_exports_last_sector() {
    let server = Server::start(1000, Setup::default());
    let storage = open(&server.uri()).unwrap();
    storage.write_at(&[1; 488], HostOffset(512)).unwrap();
    let failed = |offset| storage.write_at(&[1; 512], HostOffset(offset)).unwrap_err().kind();
    assert_eq!(failed(512), ErrorKind::Failed);
    assert_eq!([513, 1000, 1024].map(failed), [ErrorKind::NoSpace; 3]);
}

/// A server that is let in again by the end of its other connections must see that first.
#[test]
fn all_connections_end_before_another_one_is_made() {
    let server = Server::start(1 << 20, Setup::default());
    let storage = open(&format!("{}&connections=4&reconnect=30", server.uri())).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (storage, is_over) = (&storage, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    storage.write_at(&[thread; 4096], HostOffset(u64::from(thread) << 16)).unwrap();
                }
            });
        }
        for _ in 0..200 {
            // Those of the server first: the client's may be the ones that were cut.
            while server.connections() < 4 || storage.client_connections() < 4 {
                std::thread::yield_now();
            }
            server.cut_one();
        }
        is_over.store(true, Ordering::SeqCst);
    });
    assert_eq!(server.overlaps.load(Ordering::SeqCst), 0, "old connections were open");
}

#[test]
fn eight_threads_agree_with_a_model_while_connections_are_cut() {
    const THREADS: u64 = 8;
    let server = Server::start(MIB, Setup::default());
    let storage = open(&server.uri()).unwrap();
    let part = MIB as u64 / THREADS;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let storage = &storage;
            scope.spawn(move || {
                let mut model = vec![0u8; part as usize];
                let mut seed = 0x9e37_79b9_7f4a_7c15 ^ thread;
                let mut random = |below: u64| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed % below
                };
                for round in 0..600u64 {
                    let at = random(part);
                    let len = (1 + random(9000)).min(part - at);
                    let (own, offset) = (at as usize..(at + len) as usize, thread * part + at);
                    match random(5) {
                        0 | 1 => {
                            let bytes = vec![round as u8; len as usize];
                            storage.write_at(&bytes, HostOffset(offset)).unwrap();
                            model[own].fill(round as u8);
                        }
                        2 => {
                            storage
                                .write_zeroes(HostOffset(offset), len, ZeroMode::MayUnmap)
                                .unwrap();
                            model[own].fill(0);
                        }
                        _ => {
                            let mut read = vec![0xee; len as usize];
                            storage.read_at(&mut read, HostOffset(offset)).unwrap();
                            assert!(read == model[own], "thread {thread}, round {round}");
                        }
                    }
                }
            });
        }
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(10));
            server.cut();
        }
    });
    storage.read_at(&mut [0; 512], HostOffset(0)).unwrap();
    assert!(storage.client_connections() >= 1);
}
