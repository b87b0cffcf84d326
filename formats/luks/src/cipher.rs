//! Sector ciphers: AES in XTS and CBC mode, with LUKS's initialization vectors (IVs).
//!
//! Sources: LUKS1 on-disk format specification, section 5 "Cipher and hash specification"; IEEE
//! 1619 for XTS.

use std::fmt;

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use aes::{Aes128, Aes192, Aes256};
use vdkit_block::{CIPHER_SECTOR_BYTES, Error, Result, Secret, SectorCipher};
use zeroize::Zeroizing;

use crate::hash::Hash;
use crate::slots::wipe_stack;

type Block = Array<u8, U16>;

const SECTOR: usize = CIPHER_SECTOR_BYTES as usize;
const BLOCK: usize = 16;
/// AES blocks per sector.
const BLOCKS: usize = SECTOR / BLOCK;

// AES instructions are efficient on many blocks at a time: the widest take 64, and smaller groups
// are processed one by one.

/// Sectors whose IVs are computed together, and that CBC encrypts together, one block of each.
const GROUP: usize = 64;
/// Sectors whose blocks are all processed together.
const BATCH: usize = 8;

/// AES with a key of any of its three lengths.
enum Aes {
    Aes128(Box<Aes128>),
    Aes192(Box<Aes192>),
    Aes256(Box<Aes256>),
}

impl Aes {
    /// With a key of 16, 24 or 32 bytes. Never inlined: [`wipe_stack`] does not reach its caller's
    /// frame, where the expanded key would be.
    #[inline(never)]
    fn new(key: &[u8]) -> Option<Self> {
        Some(match key.len() {
            16 => Self::Aes128(Box::new(Aes128::new_from_slice(key).ok()?)),
            24 => Self::Aes192(Box::new(Aes192::new_from_slice(key).ok()?)),
            32 => Self::Aes256(Box::new(Aes256::new_from_slice(key).ok()?)),
            _ => return None,
        })
    }

    fn encrypt(&self, blocks: &mut [Block]) {
        match self {
            Self::Aes128(aes) => aes.encrypt_blocks(blocks),
            Self::Aes192(aes) => aes.encrypt_blocks(blocks),
            Self::Aes256(aes) => aes.encrypt_blocks(blocks),
        }
    }

    fn decrypt(&self, blocks: &mut [Block]) {
        match self {
            Self::Aes128(aes) => aes.decrypt_blocks(blocks),
            Self::Aes192(aes) => aes.decrypt_blocks(blocks),
            Self::Aes256(aes) => aes.decrypt_blocks(blocks),
        }
    }
}

/// Block chaining mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Independent blocks, each with a tweak.
    Xts,
    /// Each block is chained to its predecessor.
    Cbc,
}

/// Derivation of a sector's IV from its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vector {
    /// Its low 32 bits.
    Plain,
    /// All 64 bits of it.
    Plain64,
    /// All 64 bits, encrypted with a hash of the key.
    Essiv(Hash),
}

/// A cipher without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CipherSpec {
    /// Bytes of an AES key: 16, 24 or 32.
    pub(crate) aes_bytes: usize,
    pub(crate) mode: Mode,
    pub(crate) vector: Vector,
}

/// The supported ciphers, for messages.
pub(crate) const KNOWN: &str = "aes in the modes xts and cbc, with plain, plain64 or essiv:sha256";

impl CipherSpec {
    /// The cipher for a header's names and key length.
    pub(crate) fn find(name: &str, mode: &str, key_bytes: usize) -> Option<Self> {
        if name != "aes" {
            return None;
        }
        let (mode, vector) = mode.split_once('-')?;
        let mode = match mode {
            "xts" => Mode::Xts,
            "cbc" => Mode::Cbc,
            _ => return None,
        };
        let vector = match vector.split_once(':') {
            None if vector == "plain" => Vector::Plain,
            None if vector == "plain64" => Vector::Plain64,
            // The digest is an AES key.
            Some(("essiv", hash)) => match Hash::find(hash)? {
                hash if hash.digest_bytes() == 32 => Vector::Essiv(hash),
                _ => return None,
            },
            _ => return None,
        };
        let aes_bytes = match mode {
            Mode::Xts if key_bytes.is_multiple_of(2) => key_bytes / 2,
            Mode::Xts => return None,
            Mode::Cbc => key_bytes,
        };
        [16, 24, 32].contains(&aes_bytes).then_some(Self { aes_bytes, mode, vector })
    }

    /// The mode's name in a header, such as `xts-plain64`.
    pub(crate) fn mode_name(&self) -> String {
        let mode = match self.mode {
            Mode::Xts => "xts",
            Mode::Cbc => "cbc",
        };
        match self.vector {
            Vector::Plain => format!("{mode}-plain"),
            Vector::Plain64 => format!("{mode}-plain64"),
            Vector::Essiv(hash) => format!("{mode}-essiv:{}", hash.name()),
        }
    }

    /// Key length in bytes; XTS needs two AES keys.
    pub(crate) fn key_bytes(&self) -> usize {
        match self.mode {
            Mode::Xts => 2 * self.aes_bytes,
            Mode::Cbc => self.aes_bytes,
        }
    }

    /// The cipher with a key; `None` for a wrong key length.
    pub(crate) fn with_key(&self, key: &[u8]) -> Option<AesSectors> {
        if key.len() != self.key_bytes() {
            return None;
        }
        let (data, tweak) = match self.mode {
            Mode::Xts => {
                (Aes::new(&key[..self.aes_bytes])?, Some(Aes::new(&key[self.aes_bytes..])?))
            }
            Mode::Cbc => (Aes::new(key)?, None),
        };
        let essiv = match self.vector {
            Vector::Essiv(hash) => Some(Aes::new(&Zeroizing::new(hash.digest(&[key])))?),
            Vector::Plain | Vector::Plain64 => None,
        };
        Some(AesSectors { spec: *self, data, tweak, essiv })
    }
}

/// The cipher of qcow2's encryption method 1: AES-128-CBC by guest sectors. The key is the first 16
/// bytes of the password, padded with zeroes.
pub fn legacy_qcow2(password: &[u8]) -> Option<AesSectors> {
    let mut key = Zeroizing::new([0; 16]);
    let len = password.len().min(16);
    key[..len].copy_from_slice(&password[..len]);
    let spec = CipherSpec { aes_bytes: 16, mode: Mode::Cbc, vector: Vector::Plain64 };
    let cipher = spec.with_key(&*key);
    wipe_stack();
    cipher
}

/// Decrypts `bytes` with AES-CBC under a key of 16, 24 or 32 bytes and removes the padding (PKCS
/// #7), as secrets on QEMU's command lines are encrypted.
///
/// # Errors
/// [`Error::Invalid`]: a key of another length, bytes that are not whole blocks of 16, or padding of
/// another length than 1 to 16 bytes (the key is probably wrong).
pub fn decrypt_cbc_padded(key: &[u8], vector: &[u8; 16], bytes: &[u8]) -> Result<Secret> {
    let wrong = |what: String| Error::invalid(format!("an encrypted secret: {what}"));
    if bytes.is_empty() || !bytes.len().is_multiple_of(BLOCK) {
        return Err(wrong(format!("{} bytes are no whole blocks of {BLOCK}", bytes.len())));
    }
    let aes = Aes::new(key).ok_or_else(|| wrong(format!("a key of {} bytes", key.len())))?;
    let mut plain = Zeroizing::new(bytes.to_vec());
    aes.decrypt(Array::slice_as_chunks_mut(&mut plain).0);
    wipe_stack();
    let before = vector.iter().chain(bytes);
    plain.iter_mut().zip(before).for_each(|(byte, before)| *byte ^= before);
    let padding = usize::from(*plain.last().expect("not empty"));
    if !(1..=BLOCK).contains(&padding) {
        return Err(wrong(format!("{padding} bytes of padding; the key is probably wrong")));
    }
    plain.truncate(bytes.len() - padding);
    Ok(Secret::new(std::mem::take(&mut *plain)))
}

/// AES over sectors. The expanded keys are wiped on drop.
pub struct AesSectors {
    spec: CipherSpec,
    data: Aes,
    /// XTS: encrypts the IVs.
    tweak: Option<Aes>,
    /// ESSIV: computes the IVs.
    essiv: Option<Aes>,
}

impl fmt::Debug for AesSectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AesSectors").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl AesSectors {
    /// The IVs of consecutive sectors; for XTS, their first tweaks.
    fn vectors(&self, first: u64, out: &mut [Block]) {
        for (vector, i) in out.iter_mut().zip(0..) {
            let number = first.wrapping_add(i);
            let number = match self.spec.vector {
                Vector::Plain => number & u64::from(u32::MAX),
                Vector::Plain64 | Vector::Essiv(_) => number,
            };
            *vector = Block::default();
            vector[..8].copy_from_slice(&number.to_le_bytes());
        }
        for aes in [&self.essiv, &self.tweak].into_iter().flatten() {
            aes.encrypt(out);
        }
    }

    /// Processes groups of sectors, each with its IVs.
    fn in_groups(
        &self,
        bytes: &mut [u8],
        first: u64,
        mut work: impl FnMut(&mut [Block], &mut [Block]),
    ) {
        debug_assert!(bytes.len().is_multiple_of(BLOCK));
        let mut vectors = [Block::default(); GROUP];
        let mut number = first;
        for group in bytes.chunks_mut(GROUP * SECTOR) {
            let vectors = &mut vectors[..group.len().div_ceil(SECTOR)];
            self.vectors(number, vectors);
            number = number.wrapping_add(GROUP as u64);
            work(Array::slice_as_chunks_mut(group).0, vectors);
        }
    }

    /// XTS is the same in both directions, except for AES itself.
    fn xts(&self, group: &mut [Block], vectors: &[Block], turn: impl Fn(&Aes, &mut [Block])) {
        let mut tweaks = [[0; BLOCKS]; BATCH];
        for (batch, vectors) in group.chunks_mut(BATCH * BLOCKS).zip(vectors.chunks(BATCH)) {
            make_tweaks(&mut tweaks, vectors);
            let tweaks = tweaks.as_flattened();
            for (block, tweak) in batch.iter_mut().zip(tweaks) {
                xor(block, *tweak);
            }
            turn(&self.data, batch);
            for (block, tweak) in batch.iter_mut().zip(tweaks) {
                xor(block, *tweak);
            }
        }
    }

    /// A block depends on its predecessor in the sector, but sectors are independent: the first
    /// blocks of all sectors are encrypted together, then the second ones.
    fn cbc_encrypt(&self, group: &mut [Block], before: &mut [Block]) {
        let sectors = group.len().div_ceil(BLOCKS);
        for at in 0..group.len().min(BLOCKS) {
            // The last sector may be short.
            let sectors =
                if (sectors - 1) * BLOCKS + at < group.len() { sectors } else { sectors - 1 };
            let before = &mut before[..sectors];
            for (before, block) in before.iter_mut().zip(group[at..].iter().step_by(BLOCKS)) {
                xor(before, number_of(block));
            }
            self.data.encrypt(before);
            for (before, block) in before.iter().zip(group[at..].iter_mut().step_by(BLOCKS)) {
                *block = *before;
            }
        }
    }

    fn cbc_decrypt(&self, group: &mut [Block], vectors: &[Block]) {
        let mut cipher_text = [Block::default(); BATCH * BLOCKS];
        for (batch, vectors) in group.chunks_mut(BATCH * BLOCKS).zip(vectors.chunks(BATCH)) {
            let cipher_text = &mut cipher_text[..batch.len()];
            cipher_text.copy_from_slice(batch);
            self.data.decrypt(batch);
            let sectors = batch.chunks_mut(BLOCKS).zip(cipher_text.chunks(BLOCKS));
            for ((sector, cipher_text), vector) in sectors.zip(vectors) {
                let before = std::iter::once(vector).chain(cipher_text);
                for (block, before) in sector.iter_mut().zip(before) {
                    xor(block, number_of(before));
                }
            }
        }
    }
}

fn number_of(block: &Block) -> u128 {
    u128::from_le_bytes((*block).into())
}

fn xor(block: &mut Block, with: u128) {
    *block = (number_of(block) ^ with).to_le_bytes().into();
}

/// All tweaks of a few sectors, from their first tweaks. The sectors' chains are computed
/// interleaved, so that none waits for another.
fn make_tweaks(tweaks: &mut [[u128; BLOCKS]; BATCH], first: &[Block]) {
    let mut now = [0; BATCH];
    for (now, first) in now.iter_mut().zip(first) {
        *now = number_of(first);
    }
    for at in 0..BLOCKS {
        for (row, now) in tweaks.iter_mut().zip(&mut now) {
            row[at] = *now;
            // Times x in GF(2^128).
            *now = (*now << 1) ^ ((*now >> 127) * 0x87);
        }
    }
}

impl SectorCipher for AesSectors {
    fn encrypt(&self, bytes: &mut [u8], first: u64) {
        self.in_groups(bytes, first, |group, vectors| match self.spec.mode {
            Mode::Xts => self.xts(group, vectors, Aes::encrypt),
            Mode::Cbc => self.cbc_encrypt(group, vectors),
        });
    }

    fn decrypt(&self, bytes: &mut [u8], first: u64) {
        self.in_groups(bytes, first, |group, vectors| match self.spec.mode {
            Mode::Xts => self.xts(group, vectors, Aes::decrypt),
            Mode::Cbc => self.cbc_decrypt(group, vectors),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn xts_as_in_ieee_1619() {
        // Annex B, vectors 2 and 10 (the start of its 512 bytes).
        let key = bytes("1111111111111111111111111111111122222222222222222222222222222222");
        let cipher = CipherSpec::find("aes", "xts-plain64", 32).unwrap().with_key(&key).unwrap();
        let mut data = vec![0x44; 32];
        cipher.encrypt(&mut data, 0x33_3333_3333);
        let want = "c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0";
        assert_eq!(data, bytes(want));
        cipher.decrypt(&mut data, 0x33_3333_3333);
        assert_eq!(data, vec![0x44; 32]);

        let key = bytes(
            "2718281828459045235360287471352662497757247093699959574966967627\
             3141592653589793238462643383279502884197169399375105820974944592",
        );
        let cipher = CipherSpec::find("aes", "xts-plain64", 64).unwrap().with_key(&key).unwrap();
        let mut data: Vec<u8> = (0..512).map(|i| i as u8).collect();
        cipher.encrypt(&mut data, 0xff);
        assert_eq!(data[..16], bytes("1c3b3a102f770386e4836c99e370cf9b"));
        cipher.decrypt(&mut data, 0xff);
        assert!(data.iter().enumerate().all(|(i, b)| *b == i as u8));
    }

    #[test]
    fn cbc_as_in_nist_sp_800_38a() {
        // F.2.1, with the IV of sector 0.
        let key = bytes("2b7e151628aed2a6abf7158809cf4f3c");
        let cipher = CipherSpec::find("aes", "cbc-plain64", 16).unwrap().with_key(&key).unwrap();
        let vector = bytes("000102030405060708090a0b0c0d0e0f");
        let mut data = bytes("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51");
        for (byte, vector) in data.iter_mut().zip(vector) {
            *byte ^= vector;
        }
        let plain = data.clone();
        cipher.encrypt(&mut data, 0);
        let want = "7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2";
        assert_eq!(data, bytes(want));
        cipher.decrypt(&mut data, 0);
        assert_eq!(data, plain);
    }

    #[test]
    fn sectors_together_are_what_they_are_alone() {
        // Around the sizes of groups and batches, with a short last sector.
        let blocks = |sectors: usize, more: usize| sectors * BLOCKS + more;
        let lengths = [
            blocks(0, 1),
            blocks(1, 0),
            blocks(7, 31),
            blocks(BATCH, 0),
            blocks(BATCH, 5),
            blocks(GROUP - 1, 3),
            blocks(GROUP, 0),
            blocks(GROUP, 1),
            blocks(2 * GROUP + BATCH + 1, 0),
        ];
        for (mode, key_bytes) in [
            ("xts-plain64", 64),
            ("xts-essiv:sha256", 64),
            ("cbc-essiv:sha256", 32),
            ("cbc-plain", 16),
        ] {
            let spec = CipherSpec::find("aes", mode, key_bytes).unwrap();
            let key: Vec<u8> = (0..key_bytes).map(|i| (i * 7 + 1) as u8).collect();
            let cipher = spec.with_key(&key).unwrap();
            for len in lengths {
                let plain: Vec<u8> = (0..len * BLOCK).map(|i| (i * i / 11) as u8).collect();
                // Numbers that cross 2^32.
                let first = u64::from(u32::MAX) - 3;
                let mut together = plain.clone();
                cipher.encrypt(&mut together, first);
                let mut alone = plain.clone();
                for (sector, number) in alone.chunks_mut(SECTOR).zip(first..) {
                    cipher.encrypt(sector, number);
                }
                assert!(together == alone, "{mode}: {len} blocks, encrypted");
                for (sector, number) in alone.chunks_mut(SECTOR).zip(first..) {
                    cipher.decrypt(sector, number);
                }
                cipher.decrypt(&mut together, first);
                assert!(together == plain && alone == plain, "{mode}: {len} blocks, decrypted");
            }
        }
    }

    #[test]
    fn each_sector_is_encrypted_by_its_number_alone() {
        for (mode, key_bytes) in [
            ("xts-plain64", 32),
            ("xts-plain64", 48),
            ("xts-plain", 64),
            ("xts-essiv:sha256", 64),
            ("cbc-plain64", 16),
            ("cbc-plain", 24),
            ("cbc-essiv:sha256", 32),
        ] {
            let spec = CipherSpec::find("aes", mode, key_bytes).unwrap();
            assert_eq!((spec.mode_name().as_str(), spec.key_bytes()), (mode, key_bytes));
            let key: Vec<u8> = (0..key_bytes as u8).collect();
            let cipher = spec.with_key(&key).unwrap();
            let plain: Vec<u8> = (0..4 * 512u32).map(|i| (i * i / 7) as u8).collect();
            let mut whole = plain.clone();
            cipher.encrypt(&mut whole, 5);
            assert_ne!(whole[..512], plain[..512]);
            let mut alone = plain[1024..1536].to_vec();
            cipher.encrypt(&mut alone, 7);
            assert_eq!(alone, whole[1024..1536], "{mode}");
            cipher.decrypt(&mut alone, 7);
            assert_eq!(alone, plain[1024..1536], "{mode}");
            let mut far = plain[..512].to_vec();
            cipher.encrypt(&mut far, 5 + (1 << 32));
            // Plain counts only to 2^32 sectors.
            assert_eq!(far == whole[..512], spec.vector == Vector::Plain, "{mode}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        for (name, mode, key_bytes) in [
            ("serpent", "xts-plain64", 64),
            ("aes", "xts-plain64", 16),
            ("aes", "xts-plain64", 33),
            ("aes", "cbc-plain64", 64),
            ("aes", "cbc-plain64", 0),
            ("aes", "ecb-plain", 32),
            ("aes", "ctr-plain64", 32),
            ("aes", "cbc-essiv:sha1", 32),
            ("aes", "cbc-essiv", 32),
            ("aes", "cbc", 32),
            ("aes", "", 32),
        ] {
            assert_eq!(CipherSpec::find(name, mode, key_bytes), None, "{name} {mode}");
        }
    }
}
