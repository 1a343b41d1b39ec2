//! Text as Python's messages show it: `repr`, `str.strip`.

use std::fmt::Write;

use unicode_properties::{GeneralCategory as Category, UnicodeGeneralCategory};

/// `text.strip()`: Python counts the four separators U+001C to U+001F as white space too.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

fn printable(c: char) -> bool {
    c == ' '
        || !matches!(
            c.general_category(),
            Category::Control
                | Category::Format
                | Category::Surrogate
                | Category::PrivateUse
                | Category::Unassigned
                | Category::LineSeparator
                | Category::ParagraphSeparator
                | Category::SpaceSeparator
        )
}

/// `repr(text)`.
pub(crate) fn repr(text: &str) -> String {
    repr_points(text.chars().map(u32::from))
}

/// `repr` of a text given by code points, which may be lone surrogates.
pub(crate) fn repr_points(points: impl Iterator<Item = u32> + Clone) -> String {
    let single = points.clone().any(|c| c == u32::from('\''));
    let double = points.clone().any(|c| c == u32::from('"'));
    let quote = if single && !double { '"' } else { '\'' };
    let mut out = String::new();
    out.push(quote);
    for point in points {
        // Writing to a String cannot fail.
        let _ = match char::from_u32(point) {
            Some('\\') => out.write_str("\\\\"),
            Some('\n') => out.write_str("\\n"),
            Some('\r') => out.write_str("\\r"),
            Some('\t') => out.write_str("\\t"),
            Some(c) if c == quote => write!(out, "\\{c}"),
            Some(c) if printable(c) => out.write_char(c),
            _ if point < 0x100 => write!(out, "\\x{point:02x}"),
            _ if point < 0x1_0000 => write!(out, "\\u{point:04x}"),
            _ => write!(out, "\\U{point:08x}"),
        };
    }
    out.push(quote);
    out
}

/// `repr(number)` of a finite float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
pub(crate) fn repr_float(number: f64) -> String {
    // The shortest digits may be of two numbers equally near; Python shows the even one, as rounding to so many does.
    let shortest = format!("{number:e}");
    let count = shortest.split('e').next().unwrap_or_default().bytes().filter(u8::is_ascii_digit).count();
    let scientific = format!("{number:.*e}", count.saturating_sub(1));
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let decimals = usize::try_from(count as i32 - 1 - exponent).unwrap_or(0);
    let plain = format!("{number:.decimals$}");
    if plain.contains('.') {
        plain
    } else {
        plain + ".0"
    }
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(out, "{byte:02x}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_floats_show_as_python_shows_them() {
        assert_eq!(repr("a'b"), "\"a'b\"");
        assert_eq!(repr("a'\"\n\u{7f}\u{200b}é"), "'a\\'\"\\n\\x7f\\u200bé'");
        assert_eq!(repr_points([0xd800].into_iter()), "'\\ud800'");
        for (number, shown) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-0.0, "-0.0"),
            (111.215_118_408_203_13, "111.21511840820312"),
            (-214.692_169_189_453_13, "-214.69216918945312"),
            (5e-324, "5e-324"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (1.797_693_134_862_315_7e308, "1.7976931348623157e+308"),
        ] {
            assert_eq!(repr_float(number), shown);
        }
    }
}
