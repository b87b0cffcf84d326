//! Tables of finding codes: stable names for scripts, each with a severity.

/// Defines `Code` from a table of variants, names, ranks and meanings, and what the user can do about it, where that
/// is always the same. The arguments before the table: attributes of the enum, then the method that returns the
/// rank, and its type.
#[macro_export]
#[doc(hidden)]
macro_rules! codes {
    (
        $(#[$what:meta])* Code; $(#[$about:meta])* $rank:ident: $Rank:ident;
        $($variant:ident $name:literal $bad:ident $meaning:literal $($mend:literal)?;)*
    ) => {
        $(#[$what])*
        pub enum Code {
            $(#[doc = $meaning] #[serde(rename = $name)] $variant,)*
        }

        impl Code {
            /// All codes, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name in output.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            $(#[$about])*
            pub fn $rank(self) -> $Rank {
                match self { $(Self::$variant => $Rank::$bad,)* }
            }

            /// The meaning, as a sentence.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }

            /// What the user can do about it; empty where that depends.
            #[allow(dead_code)]
            pub(crate) fn mend(self) -> &'static str {
                match self { $(Self::$variant => concat!($($mend)?),)* }
            }
        }
    };
}

pub use codes;
