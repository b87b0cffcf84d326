use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use vdkit_block::bytes::hex;
use vdkit_block::{Monitor, StorageExt};
use vdkit_testbase::http::{HttpFaults, HttpServer};
use vdkit_testbase::{run_threadless, threadless_argument};

use super::*;
use crate::{Checksum, HashMethod, Hasher, spool};

fn bytes(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn ranges(server: &HttpServer) -> Arc<HttpStorage> {
    // A long timeout, for busy machines.
    match open_patiently(server.url(), &CancelToken::default(), PATIENCE, PATIENCE).unwrap() {
        Remote::Ranges(storage) => storage,
        Remote::Whole(_) => panic!("the server knows ranges"),
    }
}

/// The stream of a server that knows no ranges.
fn whole(url: &str) -> ByteStream {
    match open_patiently(url, &CancelToken::default(), PATIENCE, PATIENCE).unwrap() {
        Remote::Whole(stream) => stream,
        Remote::Ranges(_) => panic!("the server knows no ranges"),
    }
}

/// The URL of a server whose answers are written by hand: `answer` gets the number of the request,
/// and the first byte that it asks for.
fn scripted(
    answer: impl Fn(usize, usize, &mut TcpStream) -> io::Result<()> + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/disk", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (mut stream, answer) = (stream.unwrap(), answer.clone());
            std::thread::spawn(move || {
                let lines = BufReader::new(&stream).lines().map_while(io::Result::ok);
                let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
                let first = head.iter().find_map(|line| {
                    let line = line.to_ascii_lowercase();
                    line.strip_prefix("range: bytes=")?.split('-').next()?.parse().ok()
                });
                // A client that goes away is no fault.
                let _ = answer(number, first.unwrap_or(0), &mut stream);
            });
        }
    });
    url
}

#[test]
fn urls_are_told_from_names() {
    for url in ["http://h/x", "HTTPS://h/x", "https://h:8/x?y"] {
        assert!(is_url(url), "{url}");
    }
    for name in ["http", "http:/x", "ftp://h/x", "nbd://h", "/http://x", "disk.raw", ""] {
        assert!(!is_url(name), "{name}");
    }
}

#[test]
fn any_part_is_read_in_place() {
    let all = bytes(11 << 20);
    let server = HttpServer::start(all.clone(), HttpFaults::default());
    let storage = ranges(&server);
    assert_eq!(storage.len().unwrap(), all.len() as u64);
    let mut buf = vec![0; 1 << 20];
    for at in [10 << 20, 0, (4 << 20) - 500_000, (11 << 20) - 100, 12 << 20] {
        let got = storage.read_up_to(&mut buf, HostOffset(at as u64)).unwrap();
        let wanted = all.get(at..).unwrap_or_default();
        assert!(buf[..got] == wanted[..wanted.len().min(1 << 20)], "{at}");
    }
    // The probe and three blocks, each once.
    assert_eq!(server.requests(), 4);
}

#[test]
fn connections_that_break_off_are_resumed() {
    let all = bytes(20 << 20);
    let faults = HttpFaults { cut_after: Some(1_000_001), busy: 2, ..HttpFaults::default() };
    let server = HttpServer::start(all.clone(), faults);
    let storage = ranges(&server);
    let read: Vec<u8> = std::thread::scope(|scope| {
        let half = |start: usize| {
            let storage = &storage;
            move || {
                let mut out = vec![0; 10 << 20];
                for (index, piece) in out.chunks_mut(512 << 10).enumerate() {
                    let at = start + index * (512 << 10);
                    storage.read_at(piece, HostOffset(at as u64)).unwrap();
                }
                out
            }
        };
        let (a, b) = (scope.spawn(half(0)), scope.spawn(half(10 << 20)));
        [a.join().unwrap(), b.join().unwrap()].concat()
    });
    assert!(read == all);
    assert!(server.requests() > 20, "each block needs five answers");
}

#[test]
fn a_file_that_changes_meanwhile_is_noticed() {
    let faults = HttpFaults { changes_at: Some(2), ..HttpFaults::default() };
    let server = HttpServer::start(bytes(9 << 20), faults);
    let storage = ranges(&server);
    let mut buf = [0; 100];
    storage.read_at(&mut buf, HostOffset(0)).unwrap();
    let error = storage.read_at(&mut buf, HostOffset(8 << 20)).unwrap_err().to_string();
    assert!(error.contains("another file"), "{error}");
}

#[test]
fn a_server_without_ranges_is_streamed() {
    let all = bytes(3 << 20);
    let faults = HttpFaults { no_ranges: true, ..HttpFaults::default() };
    let server = HttpServer::start(all.clone(), faults.clone());
    let Remote::Whole(mut stream) = open_url(server.url(), &CancelToken::default()).unwrap() else {
        panic!("the server knows no ranges");
    };
    assert_eq!(stream.known_len(), Some(all.len() as u64));
    let mut read = vec![0; 4 << 20];
    let got = stream.read_full(&mut read).unwrap();
    assert!(read[..got] == all);
    let server = HttpServer::start(all, HttpFaults { cut_after: Some(1 << 20), ..faults });
    let Remote::Whole(mut stream) = open_url(server.url(), &CancelToken::default()).unwrap() else {
        panic!("the server knows no ranges");
    };
    assert!(stream.read_full(&mut read).is_err(), "half of it is not all of it");
}

#[test]
fn a_server_that_is_not_there_is_said_soon() {
    let error = open_url("http://127.0.0.1:1/", &CancelToken::default()).unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:1") && error.contains("cannot be asked"), "{error}");
    let cancel = CancelToken::default();
    cancel.cancel();
    assert!(matches!(open_url("http://127.0.0.1:1/", &cancel), Err(Error::Interrupted)));
}

/// A server that trickles bytes, in one response or in many, is given up.
#[test]
fn a_server_that_trickles_is_given_up() {
    let patience = Duration::from_millis(800);
    let pause = Some(Duration::from_millis(20));
    let trickling = HttpFaults { trickle: pause, ..HttpFaults::default() };
    let breaking = HttpFaults { cut_after: Some(1), ..HttpFaults::default() };
    let open = |server: &HttpServer| {
        open_patiently(server.url(), &CancelToken::default(), PATIENCE, patience).unwrap()
    };
    // (On a slow machine, one broken response alone takes too long.)
    let slow = "less than 64 KiB";
    for (faults, words) in [(trickling.clone(), [slow; 2]), (breaking, ["broke off", slow])] {
        let server = HttpServer::start(bytes(1 << 20), faults);
        let opened = open(&server);
        let Remote::Ranges(storage) = opened else { panic!("the server knows ranges") };
        let error = storage.read_at(&mut [0; 100], HostOffset(0)).unwrap_err().to_string();
        assert!(words.iter().any(|words| error.contains(words)), "{error}");
    }
    let server = HttpServer::start(bytes(1 << 20), HttpFaults { no_ranges: true, ..trickling });
    let opened = open(&server);
    let Remote::Whole(mut stream) = opened else { panic!("the server knows no ranges") };
    let error = stream.read_full(&mut [0; 1 << 20]).unwrap_err().to_string();
    assert!(error.contains("less than 64 KiB"), "{error}");
}

#[test]
fn a_read_that_is_cancelled_is_no_failure_of_the_server() {
    let faults = HttpFaults { trickle: Some(Duration::from_millis(20)), ..HttpFaults::default() };
    let server = HttpServer::start(bytes(1 << 20), faults);
    let cancel = CancelToken::default();
    let opened = open_patiently(server.url(), &cancel, PATIENCE, PATIENCE).unwrap();
    let Remote::Ranges(storage) = opened else { panic!("the server knows ranges") };
    let read = || storage.read_at(&mut [0; 100], HostOffset(0));
    std::thread::scope(|scope| {
        // The second one waits for the block that the first one fetches.
        let reads = [scope.spawn(read), scope.spawn(read)];
        std::thread::sleep(Duration::from_millis(100));
        cancel.cancel();
        for read in reads {
            let read = read.join().unwrap();
            assert!(matches!(read, Err(Error::Interrupted)), "{read:?}");
        }
    });
}

#[test]
fn what_comes_in_fast_enough_is_waited_for() {
    let (patience, short) = (Duration::from_secs(6000), Duration::from_secs(3600));
    let mut pace = Pace::new(patience);
    for _ in 0..4 {
        pace.count(0, short);
        assert!(!pace.too_slow(Duration::ZERO));
        pace.count(PACE_BYTES, Duration::ZERO);
    }
    pace.count(PACE_BYTES - 1, Duration::ZERO);
    assert!(!pace.too_slow(short));
    pace.count(0, short);
    assert!(pace.too_slow(short));
}

/// The client's own pauses, as while a target is created, say nothing about the server.
#[test]
fn a_reader_that_pauses_does_not_make_the_server_slow() {
    let all = bytes(1 << 20);
    let faults = HttpFaults { no_ranges: true, ..HttpFaults::default() };
    let server = HttpServer::start(all.clone(), faults);
    let patience = Duration::from_millis(1500);
    let opened = open_patiently(server.url(), &CancelToken::default(), PATIENCE, patience).unwrap();
    let Remote::Whole(mut stream) = opened else { panic!("the server knows no ranges") };
    let mut read = vec![0; all.len()];
    // Each piece alone is less than the pace asks for.
    for (index, piece) in read.chunks_mut(16 << 10).enumerate() {
        if index == 4 {
            std::thread::sleep(patience + Duration::from_millis(200));
        }
        let len = piece.len();
        assert_eq!(stream.read_full(piece).unwrap(), len, "{index}");
    }
    assert!(read == all);
}

#[test]
fn a_connection_that_becomes_slow_is_replaced() {
    let all = bytes(1 << 20);
    let sent = all.clone();
    let url = scripted(move |number, first, stream| {
        let (rest, len) = (&sent[first..], sent.len());
        let head = format!(
            "HTTP/1.1 206 Part\r\nContent-Range: bytes {first}-{}/{len}\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n",
            len - 1,
            rest.len()
        );
        stream.write_all(head.as_bytes())?;
        // The first request is the probe.
        let fast = if number == 1 { 128 << 10 } else { rest.len() };
        stream.write_all(&rest[..fast])?;
        rest[fast..].iter().try_for_each(|byte| {
            std::thread::sleep(Duration::from_millis(20));
            stream.write_all(&[*byte])
        })
    });
    let patience = Duration::from_millis(1500);
    let opened = open_patiently(&url, &CancelToken::default(), PATIENCE, patience).unwrap();
    let Remote::Ranges(storage) = opened else { panic!("the server knows ranges") };
    let mut read = vec![0; all.len()];
    storage.read_at(&mut read, HostOffset(0)).unwrap();
    assert!(read == all);
}

/// Without a length, a reset looks like the end.
#[test]
fn a_body_without_a_length_is_taken_only_where_something_tells_that_it_is_whole() {
    let head = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
    let serve = |head: &'static str, body: &[u8], reset: bool| {
        let body = body.to_vec();
        scripted(move |_, _, stream| {
            stream.write_all(head.as_bytes())?;
            stream.write_all(&body)?;
            if reset {
                let at_once = Some(Duration::ZERO);
                rustix::net::sockopt::set_socket_linger(&*stream, at_once)?;
            }
            Ok(())
        })
    };
    let all = bytes(300_000);
    let (good, broken) = (serve(head, &all, false), serve(head, &all[..150_000], true));
    let mut hasher = Hasher::new(HashMethod::Sha256);
    hasher.update(&all);
    let sum: Checksum = format!("sha256:{}", hex(&hasher.finish())).parse().unwrap();
    let mut buf = vec![0; 1 << 20];
    let folder = tempfile::tempdir().unwrap();
    let spooled = |stream| spool(stream, folder.path(), &Monitor::default());

    for url in [&broken, &good] {
        let error = whole(url).read_full(&mut buf).unwrap_err().to_string();
        assert!(error.contains("does not say where the file ends"), "{error}");
        assert!(spooled(whole(url)).is_err());
    }
    let error = whole(&broken).checked(sum.clone()).read_full(&mut buf).unwrap_err().to_string();
    assert!(error.contains("checksum is sha256:"), "{error}");
    assert!(spooled(whole(&broken).checked(sum.clone())).is_err());
    let (mut stream, packing) = whole(&good).checked(sum.clone()).unpack().unwrap();
    assert!(packing.is_none() && stream.peek(64 << 10).unwrap() == all[..64 << 10]);
    let got = stream.read_full(&mut buf).unwrap();
    assert!(buf[..got] == all);
    let storage = spooled(whole(&good).checked(sum)).unwrap();
    assert_eq!(storage.len().unwrap(), all.len() as u64);

    // A decoder knows the end.
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&all).unwrap();
    let packed = packed.finish().unwrap();
    let mut unpacked = |url: &str| {
        let (mut stream, packing) = whole(url).unpack().unwrap();
        assert!(packing.is_some());
        stream.read_full(&mut buf).map(|got| buf[..got] == all)
    };
    assert!(unpacked(&serve(head, &packed, false)).unwrap());
    assert!(unpacked(&serve(head, &packed[..packed.len() / 2], true)).is_err());

    // So does the last chunk, which HTTP/1.0 does not have.
    let chunks = [format!("{:x}\r\n", all.len()).as_bytes(), &all[..], b"\r\n0\r\n\r\n"].concat();
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nConnection: close\r\n\r\n";
    let got = whole(&serve(chunked, &chunks, false)).read_full(&mut buf).unwrap();
    assert!(buf[..got] == all);
    assert!(whole(&serve(chunked, &chunks[..150_000], true)).read_full(&mut buf).is_err());
    let old = "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert!(whole(&serve(old, &chunks, false)).read_full(&mut buf).is_err());
}

#[test]
fn a_file_is_read_where_no_thread_can_be_started() {
    let all = bytes(9 << 20);
    let Some(url) = threadless_argument() else {
        let server = HttpServer::start(all, HttpFaults::default());
        let name = "http::tests::a_file_is_read_where_no_thread_can_be_started";
        return run_threadless(name, server.url());
    };
    let opened = open_patiently(&url, &CancelToken::default(), PATIENCE, PATIENCE).unwrap();
    let Remote::Ranges(storage) = opened else { panic!("the server knows ranges") };
    let mut read = vec![0; all.len()];
    for (index, piece) in read.chunks_mut(1 << 20).enumerate() {
        storage.read_at(piece, HostOffset((index << 20) as u64)).unwrap();
    }
    assert!(read == all);
}
