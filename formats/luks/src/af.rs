//! The anti-forensic splitter: expands a key to so many bytes that losing any of them destroys it.
//!
//! Source: LUKS1 on-disk format specification, section 2.4 "AF-splitter".

use zeroize::Zeroizing;

use crate::hash::Hash;

/// Expands a key to `stripes` times its length. `random` is one stripe shorter than the result.
pub(crate) fn split(key: &[u8], stripes: usize, hash: Hash, random: &[u8]) -> Zeroizing<Vec<u8>> {
    debug_assert_eq!(random.len(), key.len() * (stripes - 1));
    let mut out = Zeroizing::new(Vec::with_capacity(key.len() * stripes));
    let mut state = Zeroizing::new(vec![0; key.len()]);
    for stripe in random.chunks_exact(key.len()) {
        out.extend_from_slice(stripe);
        mix(&mut state, stripe, hash);
    }
    out.extend(state.iter().zip(key).map(|(a, b)| a ^ b));
    out
}

/// Recovers the key.
pub(crate) fn merge(split: &[u8], stripes: usize, hash: Hash) -> Zeroizing<Vec<u8>> {
    let key_bytes = split.len() / stripes;
    let mut state = Zeroizing::new(vec![0; key_bytes]);
    let (random, last) = split.split_at(key_bytes * (stripes - 1));
    for stripe in random.chunks_exact(key_bytes) {
        mix(&mut state, stripe, hash);
    }
    for (state, byte) in state.iter_mut().zip(last) {
        *state ^= byte;
    }
    state
}

/// One step: XORs the next stripe in and diffuses each block.
fn mix(state: &mut [u8], stripe: &[u8], hash: Hash) {
    for (state, byte) in state.iter_mut().zip(stripe) {
        *state ^= byte;
    }
    for (index, block) in state.chunks_mut(hash.digest_bytes()).enumerate() {
        let digest = Zeroizing::new(hash.digest(&[&(index as u32).to_be_bytes(), block]));
        block.copy_from_slice(&digest[..block.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_key_comes_back_and_needs_every_byte() {
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            let key: Vec<u8> = (0..48).collect();
            let random: Vec<u8> = (0..48 * 9u32).map(|i| (i * 7 + 3) as u8).collect();
            let mut spread = split(&key, 10, hash, &random).to_vec();
            assert_eq!(*merge(&spread, 10, hash), key);
            for at in [0, 47, 200, 479] {
                spread[at] ^= 1;
                assert_ne!(*merge(&spread, 10, hash), key);
                spread[at] ^= 1;
            }
        }
    }
}
