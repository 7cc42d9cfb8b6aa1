//! Checkpoints whose content is known beforehand: a hub, or a machine between it and us, cannot put others in their place.
//!
//! Revision and hashes are facts about the published files, as several projects that pin them have them, too.

/// A revision of a checkpoint.
#[derive(Debug)]
pub(super) struct Known {
    /// Its repository.
    id: &'static str,
    /// The commit, in full.
    pub(super) revision: &'static str,
    /// SHA-256 by the file's name.
    files: &'static [(&'static str, &'static str)],
}

/// All of them.
static ALL: [Known; 2] = [COSYVOICE, WHISPER];

const COSYVOICE: Known = Known {
    id: super::DEFAULT_ID,
    revision: "29e01c4e8d000f4bcd70751be16fa94bf3d85a18",
    files: &[
        ("CosyVoice-BlankEN/config.json", "168aa1bd401abc3bc262ba15ba4e499627a8b4e006e9d050b47c22de20660185"),
        ("CosyVoice-BlankEN/merges.txt", "ac8ff86a72bee70828fbc1119bc4398c6f3a9a6e490d7b0dbe917be025478bd0"),
        ("CosyVoice-BlankEN/tokenizer_config.json", "482bd979881423375ca5414e4e0d94cd7c5349dbb17fffd46b4d36d71e62a1bc"),
        ("CosyVoice-BlankEN/vocab.json", "ca10d7e9fb3ed18575dd1e277a2579c16d108e32f27439684afa0e10b1440910"),
        ("campplus.onnx", "a6ac6a63997761ae2997373e2ee1c47040854b4b759ea41ec48e4e42df0f4d73"),
        ("cosyvoice3.yaml", "f5a6b2c6f05139d0f18861a1fe506f751e787026b77c05f7e8fef9f8a4405965"),
        ("flow.pt", "a6fab32a7825e5b0bc855ddd948f8db9370b0a786fbc249caa4595e95b608e4b"),
        ("hift.pt", "b279d7641eb97ae55b3b540cfba4f953c26492a2df758328a89a4d007ab87a65"),
        ("llm.pt", "69f43bd545131c30e98947fb360ea8b4dc9916d8e83dded7757c7ea4f5a24970"),
        ("speech_tokenizer_v3.onnx", "23236a74175dbdda47afc66dbadd5bcb41303c467a57c261cb8539ad9db9208d"),
    ],
};

/// Of the recogniser the weights; of its texts the revision has to do.
const WHISPER: Known = Known {
    id: "openai/whisper-tiny.en",
    revision: "87c7102498dcde7456f24cfd30239ca606ed9063",
    files: &[("model.safetensors", "db59695928ded6043adaef491a53ef4e12da9611184d77c53baa691a60b958ad")],
};

impl Known {
    /// What is known of `id`, at `revision` where one is asked for.
    pub(super) fn find(id: &str, revision: Option<&str>) -> Option<&'static Known> {
        ALL.iter().find(|known| known.id == id && revision.is_none_or(|wanted| wanted == known.revision))
    }

    /// SHA-256 of a file.
    pub(super) fn hash(&self, file: &str) -> Option<&'static str> {
        self.files.iter().find(|(name, _)| *name == file).map(|(_, hash)| *hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_known_checkpoint_every_file_that_is_needed_is_known() {
        let known = Known::find(super::super::DEFAULT_ID, None).expect("the one that is fetched by itself");
        assert_eq!(known.revision.len(), 40);
        for name in super::super::COSYVOICE.needed {
            assert_eq!(known.hash(name).map(str::len), Some(64), "{name}");
        }
        assert!(known.hash("README.md").is_none());
        assert!(Known::find(known.id, Some("main")).is_none(), "who asks for another gets another");
    }
}
