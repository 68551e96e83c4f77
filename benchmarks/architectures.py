"""The architectures that model_coverage.py trains, small, from configurations and random weights.

Models of Hugging Face's library give their loss as an attribute, ours give the loss itself. Nothing
drops out, so that every backend can be held against eager PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import models
import small_models
import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH = 4, 64, 512, 64
IMAGE, CLASSES = 32, 10

Batch = dict[str, Any] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Example:
    """A model and the batches that it is trained on, in turn; all have the same sizes."""

    model: nn.Module
    batches: list[Batch]


@dataclass(frozen=True)
class Architecture:
    """What kind of model it is, and how a small one is made."""

    kind: str
    make: Callable[[], Example]


def call(model: Callable[..., Any], batch: Batch) -> Tensor:
    """Call a model, or what stands for it, and return its loss."""
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    return outputs if isinstance(outputs, Tensor) else outputs.loss


def build(name: str, seed: int = 0) -> Example:
    """Build an example in training mode; equal seeds give equal numbers.

    Raises KeyError if there is no such architecture.
    """
    torch.manual_seed(seed)
    example = ARCHITECTURES[name].make()
    return Example(example.model.train(), example.batches)


@dataclass(frozen=True)
class HuggingFace:
    """Makes a model of Hugging Face's library from a configuration alone."""

    model: str
    config: str
    make_batch: Callable[[], Batch]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Example:
        """Make the model and its batches."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        keep_all(config)
        model = getattr(transformers, self.model)(config)
        return Example(model, [self.make_batch() for _ in models.batches()])


def keep_all(config: Any) -> None:
    """Have a configuration, and those in it, drop nothing out."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            keep_all(value)


def hugging_face(
    kind: str, model: str, config: str, make_batch: Callable[[], Batch], **settings: Any
) -> Architecture:
    return Architecture(kind, HuggingFace(model, config, make_batch, settings))


# The names that most configurations have for their sizes.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 2 * WIDTH,
}  # fmt: skip
POSITIONS = {"max_position_embeddings": 2 * LENGTH}
# Of decoders, whose defaults name tokens beyond so small a vocabulary.
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = SIZES | POSITIONS | ENDS | {"num_key_value_heads": 2}
# Of encoders of images.
OF_IMAGES = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH, "image_size": IMAGE, "patch_size": 8,
}  # fmt: skip


def encoder(name: str, **settings: Any) -> Architecture:
    """Return a masked language model of padded texts."""
    chosen = SIZES | POSITIONS | settings
    return hugging_face(
        "text encoder", f"{name}ForMaskedLM", f"{name}Config", masked_text, **chosen
    )


def decoder(name: str, model: str = "", length: int = LENGTH, **settings: Any) -> Architecture:
    """Return a causal language model."""
    model = model or f"{name}ForCausalLM"
    return hugging_face("text decoder", model, f"{name}Config", lambda: text(length), **settings)


def translator(name: str, **settings: Any) -> Architecture:
    """Return an encoder of texts with a decoder that reads it."""
    model = f"{name}ForConditionalGeneration"
    return hugging_face("text to text", model, f"{name}Config", masked_text, **settings)


def classifier(name: str, **settings: Any) -> Architecture:
    """Return a classifier of images."""
    chosen = {"num_labels": CLASSES} | settings
    model, config = f"{name}ForImageClassification", f"{name}Config"
    return hugging_face("vision", model, config, labelled_images, **chosen)


def text(length: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (BATCH, length))
    return {"input_ids": tokens, "labels": tokens}


def masked_text() -> Batch:
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    counts = torch.arange(LENGTH) < ends
    labels = torch.where(counts, tokens, models.IGNORED)
    return {"input_ids": tokens * counts, "attention_mask": counts.long(), "labels": labels}


def labelled_images() -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE),
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


def segmented_images() -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 2 * IMAGE, 2 * IMAGE),
        "labels": torch.randint(CLASSES, (BATCH, 2 * IMAGE, 2 * IMAGE)),
    }


def boxed_images() -> Batch:
    def boxes() -> dict[str, Tensor]:
        return {"class_labels": torch.randint(CLASSES, (3,)), "boxes": 0.2 + 0.2 * torch.rand(3, 4)}

    images = torch.randn(BATCH, 3, 2 * IMAGE, 2 * IMAGE)
    return {"pixel_values": images, "labels": [boxes() for _ in range(BATCH)]}


def spoken_text() -> Batch:
    labels = torch.randint(3, 32, (BATCH, 8))
    return {"input_values": torch.randn(BATCH, 4000), "labels": labels}


def heard_text() -> Batch:
    labels = torch.randint(3, VOCABULARY, (BATCH, 16))
    return {"input_features": torch.randn(BATCH, 80, 2 * LENGTH), "labels": labels}


def described_images() -> Batch:
    tokens = torch.randint(3, VOCABULARY - 1, (BATCH, 16))
    # CLIP pools a text at its first end, the largest of its tokens.
    tokens[:, -1] = VOCABULARY - 1
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return {"input_ids": tokens, "pixel_values": images, "return_loss": True}


def ours(
    kind: str, make_model: Callable[[], nn.Module], make_batch: Callable[[], Batch]
) -> Architecture:
    return Architecture(
        kind, lambda: Example(make_model(), [make_batch() for _ in models.batches()])
    )


def of_benchmarks(kind: str, name: str) -> Architecture:
    """Return a model of models.py."""

    def make() -> Example:
        workload = models.MODELS[name]()
        return Example(workload.model, list(workload.batches))

    return Architecture(kind, make)


def images_of_classes() -> Batch:
    return torch.randn(8, 3, IMAGE, IMAGE), torch.randint(CLASSES, (8,))


def noised_images() -> Batch:
    images = torch.randn(BATCH, 3, IMAGE, IMAGE)
    times = torch.randint(small_models.DiffusionUNet.TIMES, (BATCH,))
    return images, torch.randn_like(images), times


def images_and_noise() -> Batch:
    return torch.randn(8, 3, 32, 32), torch.randn(8, 32)


def tagged_text() -> Batch:
    shape = BATCH, 16
    return torch.randint(VOCABULARY, shape), torch.randint(CLASSES, shape)


def labelled_graph() -> Batch:
    nodes, edges = 256, 1024
    senders, receivers = torch.randint(nodes, (2, edges))
    return torch.randn(nodes, 32), senders, receivers, torch.randint(CLASSES, (nodes,))


def labelled_clouds() -> Batch:
    return torch.randn(8, 3, 256), torch.randint(CLASSES, (8,))


def colored_rays() -> Batch:
    rays, samples = 64, 32
    distances = torch.linspace(0.5, 4.0, samples) + 0.1 * torch.rand(rays, samples)
    return torch.randn(rays, 3), torch.randn(rays, 3), distances, torch.rand(rays, 3)


def labelled_text() -> Batch:
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(CLASSES, (BATCH,))


ARCHITECTURES: dict[str, Architecture] = {
    "bert": encoder("Bert"),
    "roberta": encoder("Roberta", pad_token_id=0),
    "distilbert": encoder(
        "DistilBert", dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=2, n_heads=4
    ),
    "albert": encoder("Albert", embedding_size=32),
    "electra": encoder("Electra", embedding_size=32),
    "deberta_v2": encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
        share_att_key=True, norm_rel_ebd="layer_norm",
    ),
    "longformer": encoder(
        "Longformer", attention_window=[16, 16], pad_token_id=0,
        max_position_embeddings=2 * LENGTH + 2,
    ),
    "gpt2": decoder(
        "GPT2", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4,
        n_positions=LENGTH, **ENDS,
    ),
    "gpt_neo": decoder(
        "GPTNeo", vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=16, **POSITIONS, **ENDS,
    ),
    "gpt_neox": decoder("GPTNeoX", **SIZES, **POSITIONS, **ENDS),
    "opt": decoder(
        "OPT", ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH, **SIZES, **POSITIONS, **ENDS
    ),
    "llama": decoder("Llama", **GROUPED),
    "mistral": decoder("Mistral", sliding_window=LENGTH // 2, **GROUPED),
    "qwen2": decoder("Qwen2", **GROUPED),
    "qwen3": decoder("Qwen3", head_dim=16, **GROUPED),
    "gemma": decoder("Gemma", head_dim=16, **GROUPED),
    "phi": decoder("Phi", **GROUPED),
    "falcon": decoder("Falcon", new_decoder_architecture=False, **SIZES, **POSITIONS, **ENDS),
    "bloom": decoder(
        "Bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=4, **ENDS
    ),
    # Its loop over the places of a text is written out: a short one is enough.
    "mamba": decoder(
        "Mamba", length=16, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2,
        state_size=8, **ENDS,
    ),
    "mixtral": decoder("Mixtral", num_local_experts=4, **GROUPED),
    "t5": translator(
        "T5", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2,
        num_heads=4, decoder_start_token_id=0,
    ),
    "bart": translator(
        "Bart", vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH, decoder_start_token_id=2, **POSITIONS, **ENDS,
    ),
    "pegasus": translator(
        "Pegasus", vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH, decoder_start_token_id=0, **POSITIONS, **ENDS,
    ),
    "vit": classifier("ViT", **OF_IMAGES),
    "swin": classifier(
        "Swin", image_size=IMAGE, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": classifier(
        "ConvNext", num_stages=3, hidden_sizes=[16, 32, 64], depths=[1, 1, 2], patch_size=2
    ),
    "segformer": hugging_face(
        "vision", "SegformerForSemanticSegmentation", "SegformerConfig", segmented_images,
        num_labels=CLASSES, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64],
        decoder_hidden_size=64, num_attention_heads=[1, 2, 3, 4],
    ),
    "detr": Architecture("vision", lambda: make_detr()),
    "wav2vec2": hugging_face(
        "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", spoken_text,
        **(SIZES | {"vocab_size": 32}), conv_dim=[32, 32, 32], conv_stride=[5, 4, 2],
        conv_kernel=[10, 8, 4], num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        apply_spec_augment=False, ctc_loss_reduction="mean", pad_token_id=0,
    ),
    "whisper": hugging_face(
        "audio", "WhisperForConditionalGeneration", "WhisperConfig", heard_text,
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH, max_source_positions=LENGTH, max_target_positions=LENGTH,
        decoder_start_token_id=1, begin_suppress_tokens=None, **ENDS,
    ),
    "clip": hugging_face(
        "text and vision", "CLIPModel", "CLIPConfig", described_images, projection_dim=32,
        text_config=SIZES | {"max_position_embeddings": 16, "eos_token_id": VOCABULARY - 1},
        vision_config=OF_IMAGES,
    ),
    "resnet": of_benchmarks("vision", "resnet18"),
    "mobilenet": ours("vision", lambda: small_models.MobileNet(CLASSES), images_of_classes),
    "diffusion_unet": ours("generator", lambda: small_models.DiffusionUNet(32), noised_images),
    "dcgan": ours("generator", lambda: small_models.Gan(noise=32, width=16), images_and_noise),
    "nerf": ours("generator", lambda: small_models.RadianceField(64), colored_rays),
    "lstm_tagger": ours(
        "recurrent", lambda: small_models.Tagger(VOCABULARY, WIDTH, CLASSES), tagged_text
    ),
    "gru_cell_tagger": ours(
        "recurrent", lambda: small_models.CellTagger(VOCABULARY, WIDTH, CLASSES), tagged_text
    ),
    "dlrm": of_benchmarks("recommender", "recommender"),
    "graph_network": ours(
        "graph", lambda: small_models.GraphNetwork(32, WIDTH, CLASSES), labelled_graph
    ),
    "pointnet": ours("point cloud", lambda: small_models.PointNet(CLASSES), labelled_clouds),
    "mixture_of_experts": ours(
        "text encoder",
        lambda: small_models.MixtureOfExperts(VOCABULARY, WIDTH, CLASSES, capacity=160),
        labelled_text,
    ),
}  # fmt: skip


def make_detr() -> Example:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    return HuggingFace("DetrForObjectDetection", "DetrConfig", boxed_images, {
        "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "backbone_config": backbone, "num_labels": CLASSES, "num_queries": 8, "d_model": WIDTH,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH,
    })()  # fmt: skip
