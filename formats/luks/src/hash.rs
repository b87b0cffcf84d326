//! The hashes of LUKS headers: digests, and PBKDF2 with them.

use hmac::{Hmac, KeyInit};
use ripemd::Ripemd160;
use sha1::Sha1;
use sha2::digest::Digest;
use sha2::{Sha224, Sha256, Sha384, Sha512};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha1,
    Sha224,
    Sha256,
    Sha384,
    Sha512,
    Ripemd160,
}

/// The names in headers and options.
pub(crate) const HASH_NAMES: &[&str] =
    &["sha1", "sha224", "sha256", "sha384", "sha512", "ripemd160"];

const HASHES: [Hash; 6] =
    [Hash::Sha1, Hash::Sha224, Hash::Sha256, Hash::Sha384, Hash::Sha512, Hash::Ripemd160];

impl Hash {
    pub(crate) fn find(name: &str) -> Option<Self> {
        HASHES.into_iter().find(|hash| hash.name() == name)
    }

    /// Its name in a header.
    pub(crate) fn name(self) -> &'static str {
        HASH_NAMES[self as usize]
    }

    pub(crate) fn digest_bytes(self) -> usize {
        match self {
            Self::Sha1 | Self::Ripemd160 => 20,
            Self::Sha224 => 28,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// The digest of the concatenated parts.
    pub(crate) fn digest(self, parts: &[&[u8]]) -> Vec<u8> {
        fn of<D: Digest>(parts: &[&[u8]]) -> Vec<u8> {
            let mut digest = D::new();
            parts.iter().for_each(|part| digest.update(part));
            digest.finalize().to_vec()
        }
        match self {
            Self::Sha1 => of::<Sha1>(parts),
            Self::Sha224 => of::<Sha224>(parts),
            Self::Sha256 => of::<Sha256>(parts),
            Self::Sha384 => of::<Sha384>(parts),
            Self::Sha512 => of::<Sha512>(parts),
            Self::Ripemd160 => of::<Ripemd160>(parts),
        }
    }

    /// PBKDF2 (RFC 8018, section 5.2) with HMAC over this hash.
    pub(crate) fn derive(self, key: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        match self {
            Self::Sha1 => derive::<Hmac<Sha1>>(key, salt, iterations, out),
            Self::Sha224 => derive::<Hmac<Sha224>>(key, salt, iterations, out),
            Self::Sha256 => derive::<Hmac<Sha256>>(key, salt, iterations, out),
            Self::Sha384 => derive::<Hmac<Sha384>>(key, salt, iterations, out),
            Self::Sha512 => derive::<Hmac<Sha512>>(key, salt, iterations, out),
            Self::Ripemd160 => derive::<Hmac<Ripemd160>>(key, salt, iterations, out),
        }
    }

    /// Rounds of [`Hash::derive`] per iteration.
    pub(crate) fn rounds(self, key_bytes: usize) -> u64 {
        key_bytes.div_ceil(self.digest_bytes()) as u64
    }
}

fn derive<P: KeyInit + hmac::digest::Update + hmac::digest::FixedOutput + Clone + Sync>(
    key: &[u8],
    salt: &[u8],
    iterations: u32,
    out: &mut [u8],
) {
    // Only a wrong key length could fail, and HMAC accepts any.
    let derived = pbkdf2::pbkdf2::<P>(key, salt, iterations, out);
    debug_assert!(derived.is_ok(), "HMAC takes keys of any length");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn names_and_lengths_belong_together() {
        for hash in HASHES {
            assert_eq!(Hash::find(hash.name()), Some(hash));
            assert_eq!(hash.digest(&[b"a", b"bc"]).len(), hash.digest_bytes());
            assert_eq!(hash.digest(&[b"a", b"bc"]), hash.digest(&[b"abc"]));
        }
        assert_eq!(Hash::find("md5"), None);
        assert_eq!(hex(&Hash::Sha1.digest(&[b"abc"])), "a9993e364706816aba3e25717850c26c9cd0d89d");
        assert_eq!(
            hex(&Hash::Ripemd160.digest(&[b"abc"])),
            "8eb208f7e05d987a9b044a8e98c6b087f15a0bfc"
        );
    }

    #[test]
    fn pbkdf2_as_in_rfc_6070() {
        let mut out = [0; 20];
        Hash::Sha1.derive(b"password", b"salt", 4096, &mut out);
        assert_eq!(hex(&out), "4b007901b765489abead49d926f721d065a429c1");
        let mut out = [0; 25];
        let (key, salt) = (b"passwordPASSWORDpassword", b"saltSALTsaltSALTsaltSALTsaltSALTsalt");
        Hash::Sha1.derive(key, salt, 4096, &mut out);
        assert_eq!(hex(&out), "3d2eec4fe41c849b80c8d83662c0e44a8b291a964cf2f07038");
    }
}
