//! After an image is closed, the process's memory contains neither its passphrase nor its key; nor
//! those of other ciphers that were dropped. This is the only test of its program: others would be
//! in that memory too.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;

use vdkit_block::{
    CreateRequest, Creation, Format, KeyedImages, Limits, OpenRequest, Options, Secret, Storage,
};
use vdkit_luks::{LuksDriver, NewHeader, decrypt_cbc_padded, legacy_qcow2};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::impossible_here;
use zeroize::Zeroize;

/// Searched bytes are stored masked, so that the search does not find itself.
const MASK: u8 = 0xa5;
const CHUNK: usize = 1 << 20;
/// A match may cross the border between two chunks.
const OVERLAP: usize = 256;

/// Visits all writable memory of the process, in overlapping pieces.
fn each_piece_of_memory(mut look: impl FnMut(&[u8])) {
    let mut memory = File::open("/proc/self/mem").unwrap();
    let mut buffer = vec![0; CHUNK];
    let own = buffer.as_ptr().addr() as u64;
    let maps = BufReader::new(File::open("/proc/self/maps").unwrap());
    let lines: Vec<String> = maps.lines().map(Result::unwrap).collect();
    for line in lines.iter().filter(|line| line.contains(" rw")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        let (start, end) = (number(start), number(end));
        // Everything except the buffer, which holds the last piece.
        let before = start..end.min(own);
        let behind = start.max(own + CHUNK as u64)..end;
        for range in [before, behind] {
            let mut at = range.start;
            while at < range.end {
                let len = (range.end - at).min(CHUNK as u64) as usize;
                memory.seek(SeekFrom::Start(at)).unwrap();
                // Some special mappings are unreadable and contain none of our data.
                if memory.read_exact(&mut buffer[..len]).is_ok() {
                    look(&buffer[..len]);
                }
                at += if len == CHUNK { CHUNK - OVERLAP } else { len } as u64;
            }
        }
    }
    buffer.zeroize();
}

/// Number of occurrences of these (masked) bytes in memory.
fn count(masked: &[u8]) -> usize {
    let mut found = 0;
    each_piece_of_memory(|piece| {
        found += piece
            .iter()
            .enumerate()
            .filter(|(at, byte)| {
                **byte ^ MASK == masked[0]
                    && piece.len() - at >= masked.len()
                    && piece[*at..].iter().zip(masked).all(|(a, b)| a ^ MASK == *b)
            })
            .count();
    });
    found
}

/// The AES-256 keys in memory in expanded form, as AES instructions use it (FIPS 197, section 5.2);
/// masked.
fn expanded_keys() -> Vec<[u8; 32]> {
    let sbox = sbox();
    let mut keys: Vec<[u8; 32]> = Vec::new();
    each_piece_of_memory(|piece| {
        for at in (0..piece.len().saturating_sub(64)).step_by(16) {
            let words = &piece[at..at + 64];
            if words[..32].iter().all(|b| *b == 0) || !follows(words, &sbox) {
                continue;
            }
            let key = std::array::from_fn(|i| words[i] ^ MASK);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    });
    keys
}

/// Whether 32 bytes are the key expansion of the preceding 32 bytes.
fn follows(words: &[u8], sbox: &[u8; 256]) -> bool {
    for i in 0..32 {
        let word = i / 4;
        let before = |back: usize| words[32 + i - back];
        let mixed = match word {
            0 => sbox[words[28 + (i + 1) % 4] as usize] ^ u8::from(i == 0),
            4 => sbox[before(4) as usize],
            _ => before(4),
        };
        if words[32 + i] != words[i] ^ mixed {
            return false;
        }
    }
    true
}

/// The AES S-box: inverses in its field, and an affine map (FIPS 197, section 5.1.1).
fn sbox() -> [u8; 256] {
    let times = |mut a: u8, mut b: u8| {
        let mut product = 0;
        while b != 0 {
            product ^= if b & 1 != 0 { a } else { 0 };
            a = a << 1 ^ if a & 0x80 != 0 { 0x1b } else { 0 };
            b >>= 1;
        }
        product
    };
    std::array::from_fn(|x| {
        let inverse = (0..=255).find(|&y| times(x as u8, y) == 1).unwrap_or(0);
        let turned = |by| inverse.rotate_left(by);
        inverse ^ turned(1) ^ turned(2) ^ turned(3) ^ turned(4) ^ 0x63
    })
}

fn has_aes_instructions() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("aes");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn open(storage: &Arc<MemoryStorage>, keys: &[Secret]) -> Arc<dyn Format> {
    let (storage, limits): (Arc<dyn Storage>, _) = (storage.clone(), Limits::default());
    let request = OpenRequest { storage, files: Vec::new(), writable: true, limits };
    LuksDriver.open_with_keys(request, keys).unwrap()
}

#[test]
fn nothing_of_a_key_is_left_in_memory() {
    if !has_aes_instructions() {
        return impossible_here("without AES instructions expanded keys have another form");
    }
    // A passphrase from a file, as in the command; here only its masked form is known.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    let mut passphrase = vec![0; 40];
    File::open("/dev/urandom").unwrap().read_exact(&mut passphrase).unwrap();
    std::fs::write(&path, &passphrase).unwrap();
    let masked: Vec<u8> = passphrase.iter().map(|b| b ^ MASK).collect();
    passphrase.zeroize();
    assert_eq!(count(&masked), 0, "before it is read");

    let storage = Arc::new(MemoryStorage::with_len("image", 0));
    let key = Secret::read(File::open(&path).unwrap(), 100).unwrap();
    let mut options = Options::parse("luks", LuksDriver.options(), ["iter-time=0"]).unwrap();
    options.set_key(Some(key.clone()));
    let request = CreateRequest::new(storage.clone(), 4096, options);
    LuksDriver.create(&request).unwrap();
    drop(request);
    assert!(count(&masked) > 0, "the search finds the passphrase");
    assert_eq!(expanded_keys(), Vec::<[u8; 32]>::new(), "made, and not open");

    let image = open(&storage, std::slice::from_ref(&key));
    drop(key);
    assert_eq!(count(&masked), 0, "the passphrase of an open image");
    // XTS has two keys, one for the data and one for the tweaks.
    let keys = expanded_keys();
    assert_eq!(keys.len(), 2, "the search finds expanded keys");
    for key in &keys {
        assert_eq!(count(key), 1, "an open image has its key once");
    }
    drop(image);
    assert_eq!(expanded_keys(), Vec::<[u8; 32]>::new(), "closed");
    for key in &keys {
        assert_eq!(count(key), 0, "a key of the closed image");
    }

    let options = Options::parse("luks", LuksDriver.options(), ["iter-time=0"]).unwrap();
    let new = NewHeader::from_options(&options, "").unwrap();
    let made = new.make("image", &Secret::new(vec![7; 40]), &Limits::default()).unwrap();
    let cipher = made.cipher();
    drop(made);
    let keys = expanded_keys();
    assert_eq!(keys.len(), 2, "the cipher of a new header");
    for key in &keys {
        assert_eq!(count(key), 1, "the cipher of a new header has its key once");
    }
    drop(cipher);

    let key = Secret::read(File::open(&path).unwrap(), 100).unwrap();
    drop(legacy_qcow2(key.bytes()));
    drop(key);
    assert_eq!(count(&masked[..16]), 0, "the key of a dropped legacy cipher");

    let key = Secret::read(File::open(&path).unwrap(), 100).unwrap();
    // Some last byte of the block before the last one makes the padding valid.
    let mut bytes = [0; 160];
    let plain = (0..=255).find_map(|last| {
        bytes[143] = last;
        decrypt_cbc_padded(&key.bytes()[..32], &[0; 16], &bytes).ok()
    });
    let decrypted: Vec<u8> = plain.unwrap().bytes()[32..96].iter().map(|b| b ^ MASK).collect();
    drop(key);
    assert_eq!(count(&masked[..32]), 0, "the key of an encrypted secret");
    assert_eq!(count(&decrypted), 0, "an encrypted secret");
    assert_eq!(expanded_keys(), Vec::<[u8; 32]>::new(), "all is dropped");
}
