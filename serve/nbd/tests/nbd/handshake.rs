//! The negotiation, with wrong, slow or hostile clients.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vdkit_testkit::Rng;

use vdkit_testkit::disks::MIB;
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;

const ERROR: u32 = 1 << 31;

fn begun(rig: &Rig) -> Client {
    let mut client = Client::dial(rig.path());
    client.put(&3u32.to_be_bytes());
    client
}

#[test]
fn the_list_names_the_export_and_the_empty_name_finds_it() {
    let rig = Rig::with(
        std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image")),
        MIB,
        |export| export.description = "a word".to_owned(),
        |_| {},
    );
    let mut client = begun(&rig);
    assert_eq!(client.option(3, b""), [(2, b"\0\0\0\x04diska word".to_vec()), (1, vec![])]);
    assert_eq!(client.option(3, b"x")[0].0, ERROR + 3);
    client.go("");
    assert_eq!(client.size, MIB);
    assert_eq!(client.read(0, 1).unwrap(), [0]);
    rig.end();
}

#[test]
fn info_tells_what_is_asked_and_stays_in_the_handshake() {
    let rig = Rig::new(MIB);
    let mut client = begun(&rig);
    let ask = b"\0\0\0\x04disk\0\x02\0\x01\0\x02";
    let replies = client.option(6, ask);
    let kinds: Vec<_> = replies.iter().map(|(kind, data)| (*kind, data.get(1).copied())).collect();
    assert_eq!(kinds, [(3, Some(0)), (3, Some(3)), (3, Some(1)), (3, Some(2)), (1, None)]);
    assert_eq!(client.option(6, b"\0\0\0\x04none\0\0")[0].0, ERROR + 6);
    for bad in [&b""[..], b"\0\0\0\x05disk\0\0", b"\0\0\0\x04disk\0\x01", b"\xff\xff\xff\xff"] {
        assert_eq!(client.option(7, bad)[0].0, ERROR + 3, "{bad:?}");
    }
    client.go("disk");
    rig.end();
}

#[test]
fn the_old_way_to_choose_an_export_works() {
    let rig = Rig::new(MIB);
    for (flags, padding) in [(3u32, 0), (1, 124)] {
        let mut client = Client::dial(rig.path());
        client.put(&flags.to_be_bytes());
        client.send_option(1, b"disk");
        let answer = client.take(10 + padding);
        assert_eq!(answer[..8], MIB.to_be_bytes());
        assert_eq!(client.read(0, 1).unwrap(), [0]);
    }
    let mut client = begun(&rig);
    client.send_option(1, b"none");
    assert!(client.is_ended());
    rig.end();
}

#[test]
fn contexts_are_listed_and_set() {
    let rig = Rig::new(MIB);
    let mut client = begun(&rig);
    let (list, set) = (9, 10);
    assert_eq!(client.contexts(set, "disk", &["base:allocation"]), Err(ERROR + 3));
    client.agree(Style::Structured);
    let all = ["base:allocation", "qemu:allocation-depth"];
    assert_eq!(client.contexts(list, "disk", &[]).unwrap(), all);
    assert_eq!(client.contexts(list, "disk", &["qemu:"]).unwrap(), all[1..]);
    assert!(client.contexts(set, "disk", &["qemu:"]).unwrap().is_empty());
    assert!(client.contexts(set, "disk", &[]).unwrap().is_empty());
    assert_eq!(client.contexts(set, "disk", &["x:y", all[0], all[0]]).unwrap(), all[..1]);
    assert_eq!(client.contexts(set, "none", &all), Err(ERROR + 6));
    // The failure cleared the choice.
    client.go("disk");
    assert_eq!(client.status(0, 0, 512), Err(EINVAL));
    rig.end();
}

#[test]
fn unknown_and_misplaced_options_are_refused() {
    let rig = Rig::new(MIB);
    let mut client = begun(&rig);
    assert_eq!(client.option(99, b"data")[0].0, ERROR + 1);
    assert_eq!(client.option(5, b"")[0].0, ERROR + 2, "TLS that is not there");
    assert_eq!(client.option(8, b"x")[0].0, ERROR + 3);
    assert_eq!(client.option(3, &vec![0; 100_000])[0].0, ERROR + 9);
    client.agree(Style::Extended);
    assert_eq!(client.option(8, b"")[0].0, ERROR + 10);
    assert_eq!(client.option(2, b""), [(1, vec![])]);
    assert!(client.is_ended());
    rig.end();
}

#[test]
fn a_slow_client_is_sent_away() {
    let rig = Rig::with(
        std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image")),
        MIB,
        |_| {},
        |server| server.handshake_time = Duration::from_millis(300),
    );
    // On a busy machine the time may be over before the first byte is sent.
    let slow = || {
        let mut client = Client::dial(rig.path());
        let _ = client.socket.write_all(&3u32.to_be_bytes());
        client
    };
    let mut silent = Client::dial(rig.path());
    let mut dripping = slow();
    // Sending a byte from time to time does not extend the deadline.
    let drip = std::thread::spawn(move || {
        for byte in OPTION_MAGIC.to_be_bytes().into_iter().cycle() {
            if dripping.socket.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(silent.is_ended());
    drip.join().unwrap();
    rig.settles_at(0);
    // A client that never reads and never stops sending options.
    let mut deaf = slow();
    deaf.socket.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut option = OPTION_MAGIC.to_be_bytes().to_vec();
    option.extend([0, 0, 0, 3, 0, 0, 0, 0]);
    while deaf.socket.write_all(&option).is_ok() {}
    rig.settles_at(0);
    rig.end();
}

#[test]
fn too_many_connections_are_turned_away() {
    let rig = Rig::with(
        std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image")),
        MIB,
        |_| {},
        |server| server.connections_max = 2,
    );
    let [mut a, mut b] = [(); 2].map(|()| rig.client(Style::Simple));
    // A request is answered only after the server has recorded that the client reached an export.
    assert_eq!([a.read(0, 1).unwrap(), b.read(0, 1).unwrap()], [[0], [0]]);
    let mut third = UnixStream::connect(rig.path()).unwrap();
    let mut byte = [0];
    assert_eq!(std::io::Read::read(&mut third, &mut byte).unwrap(), 0);
    drop(a);
    rig.settles_at(1);
    assert_eq!(rig.client(Style::Simple).read(0, 1).unwrap(), [0]);
    rig.end();
}

#[test]
fn peers_that_say_nothing_keep_no_client_out() {
    let rig = Rig::with(
        std::sync::Arc::new(vdkit_storage::MemoryStorage::new("image")),
        MIB,
        |_| {},
        |server| {
            server.connections_max = 4;
            server.handshake_time = Duration::from_secs(3600);
        },
    );
    let mut first = rig.client(Style::Simple);
    let mut silent: Vec<Client> = (0..3).map(|_| Client::dial(rig.path())).collect();
    // The longest negotiating client is replaced; one that reached the export stays.
    let second = rig.client(Style::Simple);
    assert!(silent.remove(0).is_ended());
    let clients: Vec<Client> = (0..2).map(|_| rig.client(Style::Simple)).collect();
    assert!(silent.iter_mut().all(Client::is_ended));
    assert_eq!(first.read(0, 1).unwrap(), [0]);
    // All have reached the export: a further client is rejected.
    let mut late = UnixStream::connect(rig.path()).unwrap();
    assert_eq!(std::io::Read::read(&mut late, &mut [0]).unwrap(), 0);
    drop((first, second, clients));
    rig.end();
}

#[test]
fn noise_harms_nobody_else() {
    let rig = Rig::new(MIB);
    let mut steady = rig.client(Style::Structured);
    let mut rng = Rng::from_env(0x0bd);
    for round in 0..400 {
        let mut client = match round % 3 {
            0 => Client::dial(rig.path()),
            1 => begun(&rig),
            _ => rig.client(STYLES[round / 3 % 3]),
        };
        let mut noise: Vec<u8> = (0..rng.below(300)).map(|_| rng.next_u64() as u8).collect();
        if round % 3 == 2 {
            // The first half is well-formed, to get past the first checks.
            let extended = client.style == Style::Extended;
            let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
            for piece in noise.chunks_mut(if extended { 32 } else { 28 }) {
                let len = piece.len().min(4);
                piece[..len].copy_from_slice(&magic.to_be_bytes()[..len]);
                if piece.len() > 8 {
                    (piece[4], piece[6], piece[7]) = (0, 0, piece[7] % 10);
                    // Mostly offsets near the disk.
                    let from = piece.len().min(16);
                    let to = piece.len().min(22);
                    piece[from..to].fill(0);
                }
            }
        }
        let _ = client.socket.write_all(&noise);
        drop(client);
        assert_eq!(steady.read(MIB - 512, 512).unwrap().len(), 512);
    }
    rig.settles_at(1);
    rig.end();
}

#[test]
fn ten_thousand_connections_leave_nothing_behind() {
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let rig = Rig::new(MIB);
    drop(rig.client(Style::Structured));
    rig.settles_at(0);
    let before = files();
    for round in 0..10_000 {
        match round % 4 {
            0 => drop(UnixStream::connect(rig.path()).unwrap()),
            1 => drop(Client::dial(rig.path())),
            2 => drop(rig.client(Style::Simple)),
            _ => {
                let mut client = rig.client(Style::Structured);
                // In the middle of a payload.
                client.request(WRITE, 0, 0, 4096, &[1; 100]);
            }
        }
    }
    rig.settles_at(0);
    // Other tests of this process open and close files.
    let mut now = files();
    for _ in 0..200 {
        if now <= before + 40 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        now = files();
    }
    assert!(now <= before + 40, "{before} files open before, {now} after");
    rig.end();
}
