//! The colors, light and dark. Tests check them against WCAG's contrast ratios.

/// Name, light, dark. A color has one meaning on a page: `accent` is the advised way, `default` the
/// default, `warn` a problem of a number, `heat-high` the best of the map. Controls have the color
/// of text. The lines `s2` to `s6` are other ways, each with the same color in every chart. People
/// with color blindness can tell the lines apart by color (after Okabe and Ito's palette, with the
/// lightness adapted for text) and by dashes.
pub(super) const COLORS: &[(&str, &str, &str)] = &[
    ("page", "#f7f7f4", "#13161a"),
    ("card", "#ffffff", "#1b1f25"),
    ("ink", "#1c222b", "#e7eaee"),
    ("quiet", "#57606c", "#a5aebb"),
    ("rule", "#d8dbdf", "#353c46"),
    ("edge", "#868e99", "#727c8a"),
    ("accent", "#0a5c9e", "#79bdf2"),
    ("accent-soft", "#e5eff8", "#1a2f42"),
    ("default", "#4b535e", "#b9c1cc"),
    ("warn", "#804400", "#f0b368"),
    ("warn-soft", "#fbf0df", "#35281a"),
    ("bar", "#8b929c", "#68717e"),
    ("track", "#eceef0", "#262c34"),
    ("heat-low", "#ffffff", "#1b1f25"),
    ("heat-high", "#c6bfd8", "#4c4667"),
    ("s0", "#0a5c9e", "#79bdf2"),
    ("s1", "#4b535e", "#b9c1cc"),
    ("s2", "#00714f", "#4fcfa4"),
    ("s3", "#93417a", "#e6a3cd"),
    ("s4", "#5c6500", "#c3cf5a"),
    ("s5", "#6247c2", "#b7a6f5"),
    ("s6", "#b0304f", "#f38ba3"),
];

/// Number of lines with a color of their own: the advised way, the default, and others.
pub(super) const LINE_COLORS: usize = 7;

/// The colors as CSS properties: light, dark if the system prefers it, and either if the reader
/// chooses it.
pub(super) fn variables() -> String {
    let block = |dark: bool| -> String {
        let of =
            |(name, l, d): &(&str, &str, &str)| format!("--{name}:{};", if dark { d } else { l });
        let scheme = if dark { "dark" } else { "light" };
        COLORS.iter().map(of).collect::<String>() + "color-scheme:" + scheme
    };
    let (light, dark) = (block(false), block(true));
    format!(
        ":root{{{light}}}\n\
         @media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n\
         :root[data-theme=dark]{{{dark}}}\n\
         @media print{{:root,:root[data-theme]{{{light}}}}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn color(name: &str, dark: bool) -> [f64; 3] {
        let (_, light_one, dark_one) = COLORS.iter().find(|(n, ..)| *n == name).unwrap();
        let text = if dark { dark_one } else { light_one };
        [1, 3, 5].map(|at| f64::from(u8::from_str_radix(&text[at..at + 2], 16).unwrap()) / 255.0)
    }

    /// Contrast of two colors. Source: WCAG 2.2, "relative luminance" and "contrast ratio".
    fn contrast(a: [f64; 3], b: [f64; 3]) -> f64 {
        let luminance = |color: [f64; 3]| {
            let [r, g, b] = color.map(|part| {
                if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
            });
            0.2126 * r + 0.7152 * g + 0.0722 * b
        };
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn text_and_lines_can_be_seen() {
        let text = 4.5;
        let line = 3.0;
        let lines = ["s0", "s1", "s2", "s3", "s4", "s5", "s6"];
        for dark in [false, true] {
            for (back, least, fronts) in [
                ("card", text, &lines[..]),
                ("card", text, &["ink", "quiet", "accent", "warn", "default"]),
                ("card", line, &["bar", "edge"]),
                ("page", text, &["ink", "quiet", "accent"]),
                ("page", line, &["edge"]),
                ("accent-soft", text, &["ink", "accent"]),
                ("warn-soft", text, &["warn"]),
                ("heat-low", text, &["ink"]),
                ("heat-high", text, &["ink"]),
                ("track", text, &["ink"]),
            ] {
                for front in fronts {
                    let found = contrast(color(front, dark), color(back, dark));
                    assert!(found >= least, "{front} on {back}, dark {dark}: {found:.2}");
                }
            }
        }
    }

    #[test]
    fn every_line_has_a_color_that_is_nothing_else() {
        let lines: Vec<_> = COLORS.iter().filter(|(name, ..)| name.starts_with('s')).collect();
        assert_eq!(lines.len(), LINE_COLORS);
        for (i, (name, light, dark)) in lines.iter().enumerate() {
            // The first two also color bars and tags.
            let others = COLORS.iter().filter(|(other, ..)| {
                other != name && !(i == 0 && *other == "accent") && !(i == 1 && *other == "default")
            });
            for (other, l, d) in others {
                assert!(l != light && d != dark, "{name} is {other}");
            }
        }
    }

    #[test]
    fn every_color_of_the_style_is_defined() {
        let style = super::super::STYLE;
        for part in style.split("var(--").skip(1) {
            let name = part.split([')', ',']).next().unwrap();
            // A field of the map sets its own value.
            let own = style.contains(&format!("--{name}:")) || name == "v";
            assert!(own || COLORS.iter().any(|(known, ..)| *known == name), "{name}");
        }
        assert!(variables().contains("--ink:#1c222b"));
    }
}
