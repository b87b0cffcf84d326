//! Offset newtypes and alignment arithmetic.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};

macro_rules! offset {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// This offset plus `bytes`; `None` on overflow.
            pub fn checked_add(self, bytes: u64) -> Option<Self> {
                self.0.checked_add(bytes).map(Self)
            }
        }

        impl Add<u64> for $name {
            type Output = Self;
            fn add(self, bytes: u64) -> Self {
                Self(self.0 + bytes)
            }
        }

        impl AddAssign<u64> for $name {
            fn add_assign(&mut self, bytes: u64) {
                self.0 += bytes;
            }
        }

        impl Sub for $name {
            type Output = u64;
            fn sub(self, other: Self) -> u64 {
                self.0 - other.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

offset! {
    /// A byte offset on the disk that the guest sees.
    GuestOffset
}

offset! {
    /// A byte offset in a host file or device.
    HostOffset
}

/// `value` rounded down to a multiple of `unit`, a power of two.
pub const fn align_down(value: u64, unit: u64) -> u64 {
    debug_assert!(unit.is_power_of_two());
    value & !(unit - 1)
}

/// `value` rounded up to a multiple of `unit`, a power of two; `None` on overflow.
pub const fn align_up(value: u64, unit: u64) -> Option<u64> {
    debug_assert!(unit.is_power_of_two());
    match value.checked_add(unit - 1) {
        Some(sum) => Some(sum & !(unit - 1)),
        None => None,
    }
}

/// Whether `value` is a multiple of `unit`, a power of two.
pub const fn is_aligned(value: u64, unit: u64) -> bool {
    value & (unit - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_holds_at_the_edges() {
        assert_eq!(align_down(4097, 4096), 4096);
        assert_eq!(align_up(4097, 4096), Some(8192));
        assert_eq!(align_up(0, 512), Some(0));
        assert_eq!(align_up(u64::MAX - 3, 4096), None);
        assert!(is_aligned(1 << 63, 1 << 21));
        assert_eq!(GuestOffset(u64::MAX).checked_add(1), None);
    }
}
