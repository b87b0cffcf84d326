//! Codes of findings, as a table: names that scripts rely on, each with how bad it is.

/// Makes `Code` of a table of variants, names, ranks and meanings. Ahead of it: what a code is
/// and how it is derived, then the method that tells the rank, and the type of that.
macro_rules! codes {
    (
        $(#[$what:meta])* Code; $(#[$about:meta])* $rank:ident: $Rank:ident;
        $($variant:ident $name:literal $bad:ident $meaning:literal;)*
    ) => {
        $(#[$what])*
        pub enum Code {
            $(#[doc = $meaning] #[serde(rename = $name)] $variant,)*
        }

        impl Code {
            /// All of them, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name in answers.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            $(#[$about])*
            pub fn $rank(self) -> $Rank {
                match self { $(Self::$variant => $Rank::$bad,)* }
            }

            /// What it means, in a sentence.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }
        }
    };
}

pub(crate) use codes;
